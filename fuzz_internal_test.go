package pgxlock

import (
	"encoding/json"
	"strings"
	"testing"
)

// FuzzMetadata checks that what is stored is what was given, and refuses the rest without repeating it.
func FuzzMetadata(f *testing.F) {
	for _, text := range []string{"", "step 3", `{"a": "b"}`, "<&>\u2028\u009b", "\xff", "\x00", strings.Repeat("\x01", maxMetadata/6), strings.Repeat("x", maxMetadata)} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var o options
		if err := Metadata(text).apply(&o); err != nil {
			if len(err.Error()) > 200 || o.Metadata != nil {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		var stored string
		if err := json.Unmarshal([]byte(*o.Metadata), &stored); err != nil || stored != text || len(*o.Metadata) > maxMetadata || strings.Contains(*o.Metadata, "\n") {
			t.Errorf("%q is stored as %s: %v", text, *o.Metadata, err)
		}
	})
}
