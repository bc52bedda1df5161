package oneline_test

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/pgxlock/pgxlock/internal/oneline"
)

func TestTextEscapesWhatCannotBePrintedAndNothingElse(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                          "",
		"order:42":                  "order:42",
		`a "quoted" \ name`:         `a "quoted" \ name`,
		"Grüße, 世界 🔒 é":             "Grüße, 世界 🔒 é",
		"\x1b[31mred\a\b\x7f":       `\x1b[31mred\a\b\x7f`,
		"one\ntwo\r\n\tthree":       `one\ntwo\r\n\tthree`,
		"\u202egnp.exe\u2066\u200f": `\u202egnp.exe\u2066\u200f`,
		"\u0085\u2028\ufeff\x00":    `\u0085\u2028\ufeff\x00`,
		"a\xffb\xe2\x80":            `a\xffb\xe2\x80`,
		"\ufffd":                    "\ufffd",
	} {
		got := oneline.Text(text)
		if got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
		if again := oneline.Text(got); again != got {
			t.Errorf("%q is escaped twice: %q", got, again)
		}
	}
}

func TestJSONEscapesWhatCannotBePrintedAndMeansTheSame(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"Grüße, 世界 🔒 <&>":                   `"Grüße, 世界 🔒 <&>"`,
		"a\x7f\u009b2J\x1b[2J\u202e.\u2028": `"a\u007f\u009b2J\u001b[2J\u202e.\u2028"`,
		"\U000e0001\u009b":                  `"\udb40\udc01\u009b"`,
		"\\u009b":                           `"\\u009b"`,
	} {
		var got strings.Builder
		if err := oneline.JSON(&got, map[string]string{text: text}, " "); err != nil {
			t.Fatal(err)
		}
		if want := "{\n " + want + ": " + want + "\n}\n"; got.String() != want {
			t.Errorf("%q: %q, want %q", text, got.String(), want)
		}
		var back map[string]string
		if err := json.Unmarshal([]byte(got.String()), &back); err != nil || back[text] != text {
			t.Errorf("%q means %q: %v", got.String(), back, err)
		}
	}
}

func TestJoinMakesOneLineAndEscapesTheRest(t *testing.T) {
	t.Parallel()
	if got, want := oneline.Join("one\r\ntwo\t\x1b[2J\n\none\u2028three"), `one two \x1b[2J one three`; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestCutTextIsStillUTF8(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{"": "", "äöü": "äöü", "äöüß": "äöü…", strings.Repeat("世", 1<<20): "世世世…"} {
		if got := oneline.Cut(text, 3, "…"); got != want || !utf8.ValidString(got) {
			t.Errorf("%.20q: %q, want %q", text, got, want)
		}
	}
}
