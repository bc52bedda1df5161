package oneline_test

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"

	"github.com/pgxlock/pgxlock/internal/oneline"
)

// FuzzTexts checks that a terminal obeys no text.
func FuzzTexts(f *testing.F) {
	for _, text := range []string{"", "order:42", "a\x00b\x1b[2J\x7f\u009b\u202e\u2028", "\xff\xc2", `\u009b`, "\U000e0001", "<&>\ufffd"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		obeyed := func(r rune) bool { return !unicode.IsPrint(r) }
		for _, shown := range []string{oneline.Text(text), oneline.Join(text)} {
			if strings.ContainsFunc(shown, obeyed) || len(shown) > 6*len(text) || oneline.Text(shown) != shown {
				t.Errorf("%q is shown as %q", text, shown)
			}
		}
		var shown strings.Builder
		if err := oneline.JSON(&shown, []string{text}, ""); err != nil {
			t.Fatal(err)
		}
		line := strings.TrimSuffix(shown.String(), "\n")
		var back []string
		if err := json.Unmarshal([]byte(line), &back); err != nil || strings.ContainsFunc(line, obeyed) || len(back) != 1 || back[0] != string([]rune(text)) {
			t.Errorf("%q is %q in JSON, and read as %q: %v", text, line, back, err)
		}
	})
}
