package documents

import (
	"bytes"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
)

// unclear are phrases that have a better word everywhere. Phrases that are right in some
// sentences do not belong here.
var unclear = []struct {
	phrases []string // in lower case; a space stands for any white space
	better  string
}{
	{[]string{"in vain"}, `"without success", or say what happened: "is refused", "gets no answer"`},
	{[]string{"shall"}, `"must", "will" or "may"`},
	{[]string{"nobody's loss"}, `"is logged and ignored"`},
	{[]string{"for want of"}, `"because ... is missing"`},
	{[]string{"whoever", "whomever"}, `name the actor: "the holder", "a waiter", "callers"; or "no matter who"`},
	{[]string{"what is asked"}, `"the request"`},
	{[]string{"to who", "for who", "by who", "from who"}, `name the actor: "the holder", "a waiter", "callers"`},
	{[]string{"session lock"}, `"advisory lock"`},
	{[]string{"steal", "steals", "stealing", "stole", "stolen"}, `"take over"`},
	{[]string{"bury", "buries", "buried", "burying"}, `"reap" or "remove"`},
	{[]string{"believed until"}, `"deadline", or "expires locally"`},
	{[]string{"liveness unit"}, `"renewed, lost and closed together"`},
	{[]string{"combiner"}, `"batcher", for the package; "batch", for what it sends`},
	{[]string{"hearsay"}, `"notification"`},
	{[]string{"not surely once"}, `"not exactly once"`},
	{[]string{"of no use"}, `"not usable"`},
}

func TestTextsAvoidUnclearPhrases(t *testing.T) {
	t.Parallel()
	read := 0
	err := fs.WalkDir(os.DirFS("."), ".", func(file string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (file == "bin" || entry.Name() == "testdata" || strings.HasPrefix(entry.Name(), ".") && file != "."):
			return fs.SkipDir // what is built, what others wrote, and what belongs to tools
		case entry.IsDir() || file == "internal/documents/words_test.go":
			return nil
		}
		text, err := prose(file)
		if text == nil || err != nil {
			return err
		}
		read++
		for _, u := range unclear {
			for _, phrase := range u.phrases {
				for _, at := range find(text, phrase) {
					t.Errorf("%s:%d: %q; better: %s", file, 1+bytes.Count(text[:at], []byte("\n")), phrase, u.better)
				}
			}
		}
		return nil
	})
	if err != nil || read < 400 {
		t.Fatalf("read %d files: %v", read, err)
	}
}

func TestPhrasesAreFoundAcrossLines(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]int{
		"in vain":                         {0},
		"it is in  vain, in\tvain":        {6, 16},
		"// asks in\n\t// vain":           {8},
		"-- asks in\n-- vain":             {8},
		"> asks in\n> vain, in\n\n* vain": {7, 18},
		"asks in\n// -- vain":             nil, // one mark begins a line
		"asks in // vain":                 nil,
		"invain, begin vain, in vainly":   nil,
		"in_vain, _in vain, in vain_":     nil,
		"in\x00vain":                      nil,
		"what is in":                      nil,
	} {
		if got := find([]byte(text), "in vain"); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

// find returns where a phrase begins in a text in lower case. It uses no regular expression:
// under the race detector that takes many times as long for all texts.
func find(text []byte, phrase string) (found []int) {
	words := strings.Fields(phrase)
	first := []byte(words[0])
	for from := 0; ; {
		i := bytes.Index(text[from:], first)
		if i < 0 {
			return found
		}
		begin := from + i
		from = begin + len(first)
		end, ok := from, begin == 0 || !isWord(text[begin-1])
		for _, word := range words[1:] {
			next := skipSpace(text, end)
			if ok = ok && next > end && bytes.HasPrefix(text[next:], []byte(word)); !ok {
				break
			}
			end = next + len(word)
		}
		if ok && (end == len(text) || !isWord(text[end])) {
			found = append(found, begin)
		}
	}
}

func isWord(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_'
}

// skipSpace returns where the white space that begins at i ends. What begins a line of a
// comment, a list or a quotation is white space.
func skipSpace(text []byte, i int) int {
	for lineBegins := false; i < len(text); i++ {
		switch c := text[i]; {
		case c == '\n':
			lineBegins = true
		case c == ' ' || c == '\t' || c == '\r':
		case lineBegins && (bytes.HasPrefix(text[i:], []byte("//")) || bytes.HasPrefix(text[i:], []byte("--"))):
			lineBegins = false
			i++
		case lineBegins && strings.IndexByte("*>#|-", c) >= 0:
			lineBegins = false
		default:
			return i
		}
	}
	return i
}

// prose returns, in lower case, the text of a file in which phrases are looked for: all of SQL
// and Markdown, and of Go the comments and strings. Offsets and lines are those of the file.
// nil: the file is of another kind.
func prose(file string) ([]byte, error) {
	kind := path.Ext(file)
	if kind != ".go" && kind != ".sql" && kind != ".md" {
		return nil, nil
	}
	text, err := os.ReadFile(file)
	if err == nil && kind == ".go" {
		text = commentsAndStrings(text)
	}
	for i, c := range text {
		if 'A' <= c && c <= 'Z' {
			text[i] = c - 'A' + 'a'
		}
	}
	return text, err
}

// commentsAndStrings blanks out the rest of a Go file, so that no phrase reaches across it.
func commentsAndStrings(source []byte) []byte {
	files := token.NewFileSet()
	file := files.AddFile("", files.Base(), len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, scanner.ScanComments)
	text := bytes.Clone(source)
	for end := 0; ; {
		pos, tok, literal := s.Scan()
		if tok == token.COMMENT || tok == token.STRING || tok == token.EOF {
			begin := file.Offset(pos)
			for i := end; i < begin; i++ {
				if c := source[i]; c != ' ' && c != '\t' && c != '\n' {
					text[i] = 0
				}
			}
			end = begin + len(literal)
		}
		if tok == token.EOF {
			return text
		}
	}
}
