package lockkey

import (
	"slices"
	"strings"
	"testing"
)

func TestNamespaceMakesAnotherLockOfTheSameName(t *testing.T) {
	if got := Identify(In("billing", "invoice:42")).Number; got != 1572001551135567388 || IdentifyIn("billing", "invoice:42").Number != got {
		t.Errorf("the number is %d, and must never change", got)
	}
	keys := []string{"b/c", "a/b/c", "@a/b/c", "c", "a", In("a", "b/c"), In("a", "@b/c"), In("@a", "b/c"), In("b", "c")}
	var ids []ID
	for _, key := range keys {
		id := Identify(key)
		if slices.Contains(ids, id) {
			t.Errorf("%q has the number of another key", key)
		}
		ids = append(ids, id)
		if err := CheckAdvisory(key); err != nil {
			t.Errorf("%q: %v", key, err)
		}
		if text, raw := Split(key); Join(text, raw) != key || IsNumber(key) || strings.Contains(text, "\x00") {
			t.Errorf("%q is written %q", key, text)
		}
	}
	for _, wrong := range []string{
		In("a/b", "c"), In("a", ""), In("a\x00", "b"), In("\xff", "b"), In("a", "b\x00c"), In(strings.Repeat("n", 64), "k"), In("a", strings.Repeat("k", 253)),
		In("a", In("b", "c")), In("a", ID{Number: 42}.Key()), "\x00@", "\x00@/a", "\x00@a",
		strings.Repeat("\x00@a/", 60) + "k", // in a moment, though each level could be looked at twice
	} {
		if _, raw := ParseRaw(wrong); raw || CheckAdvisory(wrong) == nil {
			t.Errorf("%q was taken", wrong)
		}
	}
	if In("", "k") != "k" || IdentifyIn("", "k") != Identify("k") {
		t.Error("no namespace changes the key")
	}
}
