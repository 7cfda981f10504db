// Where comments, strings, numbers and keywords lie in code. It colours; it does not parse.

const WORDS = new Set(
  (
    "and as assert async await bool boolean break case catch char class const continue def default del delete do double " +
    "elif else end enum except export extends extern false False final finally float fn for from func function global " +
    "go if impl implements import in include instanceof int interface is lambda let long loop match mod module mut " +
    "namespace new nil None not null of or package pass private protected pub public raise ref return Self self select " +
    "short signed sizeof static string struct super switch template then this throw throws trait true True try type " +
    "typedef typeof undefined union unsigned unsafe use using var virtual void volatile where while with yield " +
    "SELECT FROM WHERE INSERT INTO UPDATE DELETE JOIN LEFT RIGHT INNER ON AS AND OR NOT NULL GROUP ORDER BY LIMIT VALUES " +
    "CREATE TABLE echo fi done esac local"
  ).split(" "),
);
const HASH = /^(py|python|sh|bash|zsh|shell|console|rb|ruby|r|yaml|yml|toml|ini|makefile|dockerfile|perl|pl|julia)$/;
const DASH = /^(sql|lua|haskell|hs|ada)$/;
const PLAIN = /^(text|txt|plain|md|markdown|diff|log)$/;
const REST =
  '|("""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$)|"(?:\\\\.|[^"\\\\\\n])*"?|\'(?:\\\\.|[^\'\\\\\\n])*\'?|`(?:\\\\.|[^`\\\\])*`?)' +
  "|\\b(0[xXbB][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][-+]?\\d+)?)\\b|([A-Za-z_$][\\w$]*)";
const COMMENTS = { hash: "(#[^\\n]*)", dash: "(--[^\\n]*)", slash: "(//[^\\n]*|/\\*[^]*?(?:\\*/|$))" };

/** `[start, end, class]` of what is coloured in `code`, in order. */
export function codeTokens(code, language) {
  if (PLAIN.test(language)) return [];
  const family = HASH.test(language) ? "hash" : DASH.test(language) ? "dash" : "slash";
  const found = [];
  for (const match of code.matchAll(new RegExp(COMMENTS[family] + REST, "g"))) {
    const [text, comment, string, number, word] = match;
    const kind = comment ? "comment" : string ? "string" : number ? "number" : WORDS.has(word) ? "keyword" : null;
    if (kind) found.push([match.index, match.index + text.length, `hl-${kind}`]);
  }
  return found;
}
