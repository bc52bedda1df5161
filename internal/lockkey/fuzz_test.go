package lockkey_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// FuzzKeys checks what a key names, whatever its text is.
func FuzzKeys(f *testing.F) {
	for _, key := range []string{"", "order:42", lockkey.ID{Number: -1}.Key(), lockkey.ID{Number: 2<<32 - 2, Pair: true}.Key(), "\x00#+1", "\x00#1,+2", lockkey.In("billing", "k"), lockkey.In("a", "\x00#1"), lockkey.In("a/b", "c"), "\xff", "a\u009b\x00", strings.Repeat("世", 300), "0:k", "*shared"} {
		f.Add(key)
	}
	f.Fuzz(func(t *testing.T, key string) {
		shown := lockkey.Shown(key)
		if strings.ContainsFunc(shown, func(r rune) bool { return !unicode.IsPrint(r) }) || len(shown) > 10*(lockkey.MaxText+1)+2 {
			t.Errorf("%q is shown as %q", key, shown)
		}
		if id, raw := lockkey.ParseRaw(key); raw {
			same := id.Key()
			if namespace, name := lockkey.Within(key); namespace != nil {
				same = lockkey.In(*namespace, name)
			}
			if same != key || lockkey.Identify(key) != id || lockkey.CheckAdvisory(key) != nil || lockkey.Check(key) == nil {
				t.Errorf("%q and %q name the lock %v", key, same, id)
			}
		}
		if err := lockkey.Check(key); err != nil {
			if strings.Contains(err.Error(), "\n") || len(err.Error()) > 200 {
				t.Errorf("%q: %v", key, err)
			}
			return
		}
		for _, name := range []lockkey.Name{{Key: key}, {ID: lockkey.Identify(key)}} {
			if again, ok := lockkey.ParseName(fmt.Sprintf("%d:%s", name.Kind(), name.Text())); !ok || again != name {
				t.Errorf("%q: %v is read as %v, %t", key, name, again, ok)
			}
		}
	})
}

// FuzzPayloads reads what any role may send as a notification.
func FuzzPayloads(f *testing.F) {
	for _, payload := range []string{"", "0:order:42", "1:-9223372036854775808", "2:9223372036854775807", "1:9223372036854775808", "2:-", "3:1", "0:", "1:00"} {
		f.Add(payload)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		name, ok := lockkey.ParseName(payload)
		if !ok {
			return
		}
		if again, ok := lockkey.ParseName(fmt.Sprintf("%d:%s", name.Kind(), name.Text())); !ok || again != name || name.Compare(again) != 0 {
			t.Errorf("%q: %v is read as %v, %t", payload, name, again, ok)
		}
		if name.Kind() != 0 {
			if number, err := strconv.ParseInt(payload[2:], 10, 64); err != nil || number != name.ID.Number {
				t.Errorf("%q names %v: %v", payload, name, err)
			}
		}
	})
}
