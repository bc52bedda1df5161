package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mattn/go-runewidth"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/monitor"
)

const (
	longestPod = "billing-worker-deployment-eu-central-production-7c9f8d6b5-x2v4q" // 63 characters
	ofPod      = longestPod + ":4711:ABCDEFGHIJKLMNOPQRSTUVWXYZ"
)

// crowded is a database with what is longest: names of two columns a character, metadata.
func crowded() monitor.Snapshot {
	at := time.Now()
	return monitor.Snapshot{
		At: at,
		Holders: []pgxlock.Holder{
			{Key: "migrate:orders", Kind: pgxlock.KindAdvisory, Mode: pgxlock.Shared, ID: "billing:48151", PID: 48151, State: pgxlock.StateLive, Since: at.Add(-3 * time.Hour), Client: "10.0.12.7"},
			{Key: "注文:請求書:4711", Kind: pgxlock.KindLease, ID: ofPod, Token: 1099511627777, State: pgxlock.StateLive, Since: at.Add(-time.Minute), Expires: at.Add(time.Minute), Metadata: "invoices of November"},
		},
		Waiters: []monitor.Waiter{{Key: "注文:請求書:4711", Kind: pgxlock.KindLease, Owner: "other-" + longestPod + ":22", Behind: 2, Since: at.Add(-12 * time.Second)}},
		Missing: []string{strings.Repeat("who waits ", 20)},
	}
}

func TestNarrowTableLeavesOutColumnsAndKeepsTheEndOfNames(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		columns   int
		shows     []string
		shortened bool
	}{
		{30, []string{"KEY", "STATE", "MODE", "HOLDER"}, true},
		{60, []string{"KEY", "STATE", "MODE", "HOLDER"}, true},
		{80, []string{"KEY", "STATE", "HELD FOR", "REMAINING", "MODE", "HOLDER"}, true},
		{100, []string{"KEY", "STATE", "HELD FOR", "REMAINING", "MODE", "HOLDER", "NOTE"}, true},
		{160, []string{"KEY", "KIND", "STATE", "HELD FOR", "REMAINING", "MODE", "HOLDER", "NOTE"}, true},
		{200, []string{"KEY", "KIND", "STATE", "HELD FOR", "REMAINING", "MODE", "HOLDER", "TOKEN", "PID", "NOTE"}, true},
		{220, []string{"KEY", "KIND", "STATE", "HELD FOR", "REMAINING", "MODE", "HOLDER", "TOKEN", "PID", "NOTE"}, false},
	} {
		shot := crowded()
		var text strings.Builder
		if err := printHolders(&text, false, sheet{columns: test.columns, more: "--wide"}, shot.At, shot.Holders); err != nil {
			t.Fatal(err)
		}
		fits(t, text.String(), test.columns)
		header, rest, _ := strings.Cut(text.String(), "\n")
		rest = strings.Join(strings.Fields(rest), " ")
		for _, title := range holderTable.titles {
			if shown := slices.Contains(test.shows, title); strings.Contains(header, title) != shown {
				t.Errorf("%d columns show %s: %t\n%s", test.columns, title, !shown, text.String())
			} else if left := strings.Contains(rest, title); left == shown && (title != "HOLDER" || !test.shortened) && (title != "KEY" || test.columns > 30) {
				t.Errorf("%d columns say nothing of %s, or too much\n%s", test.columns, title, text.String())
			}
		}
		if ids := strings.Contains(rest, ofPod); ids == test.shortened || strings.Contains(rest, "shortened: ") != test.shortened {
			t.Errorf("%d columns shorten ids: %t\n%s", test.columns, !ids, text.String())
		}
		if test.columns >= 60 && !strings.Contains(rest, "v4q:4711:") {
			t.Errorf("%d columns do not tell the pod from others\n%s", test.columns, text.String())
		}
		if test.columns < 220 && !strings.Contains(rest, "(--wide shows all)") {
			t.Errorf("%d columns do not say how to see all\n%s", test.columns, text.String())
		}
	}
}

// fits fails the test if a line is wider than the screen.
func fits(t *testing.T, text string, columns int) {
	t.Helper()
	for row := range strings.Lines(text) {
		if got := runewidth.StringWidth(strings.TrimSuffix(row, "\n")); got > columns {
			t.Errorf("%d columns of %d: %q", got, columns, row)
		}
	}
}

func TestWatchFitsTheScreen(t *testing.T) {
	t.Parallel()
	for _, columns := range []int{14, 40, 80, 99, 200} {
		for _, more := range []string{"w", ""} {
			text, err := frame(false, crowded(), true, sheet{columns: columns, more: more, clips: true})
			if err != nil {
				t.Fatal(err)
			}
			fits(t, text, columns)
			for _, want := range []string{"TOKEN", "1099511627777", "PID", "48151", "WAITED", "12s", "HELD BY", "invoices of November", "10.0.12.7"} {
				if more == "" && columns >= 40 && !strings.Contains(text, want) {
					t.Errorf("%d columns that are to show all do not show %s:\n%s", columns, want, text)
				}
			}
			if got := strings.Count(text, "WXYZ\n") + strings.Count(text, "WXYZ "); more == "" && columns > 30 && got != 2 { // a holder's and held by
				t.Errorf("%d columns show the end of %d of 2 holder ids:\n%s", columns, got, text)
			}
		}
	}
	shot := crowded()
	if text, err := frame(false, monitor.Snapshot{Holders: shot.Holders[1:]}, true, sheet{columns: 199}); err != nil || strings.Contains(text, "PID") {
		t.Errorf("a column that is empty takes room: %v\n%s", err, text)
	}
}

// A shortened holder id is that of one holder, by which evict finds it, and makes room for
// what people read.
func TestHolderIDsAreShortenedBeforeAllElse(t *testing.T) {
	t.Parallel()
	at := time.Now()
	ids := []string{"vm:26711:ABCDEFGHIJKLMNOPQRSTUV2345", "vm:26712:BCDEFGHIJKLMNOPQRSTUVWABCD", "vm:26713:ABCDEFGHIJKLMNOPQRSTU2WXYZ", "vm:26713:ABCDEFGHIJKLMNOPQRSTU3WXYZ"}
	shot := monitor.Snapshot{At: at, Waiters: []monitor.Waiter{{Key: "report", Kind: pgxlock.KindLease, Owner: "vm:26719:QRSTUVABCDEFGHIJKLMNOPWXYZ", Since: at}}}
	for i, id := range ids {
		shot.Holders = append(shot.Holders, pgxlock.Holder{Key: "report", Kind: pgxlock.KindLease, Mode: pgxlock.Shared, ID: id, Token: int64(i), State: pgxlock.StateLive, Since: at, Expires: at.Add(time.Minute)})
	}
	const key = "invoice:with-a-long-name:42"
	shot.Holders = append(shot.Holders, pgxlock.Holder{Key: key, Kind: pgxlock.KindLease, ID: "pod:1:ABCDEFGHIJKLMNOPQRSTUVWXYZ", State: pgxlock.StateExpired, EvictedBy: "ada", EvictionReason: "hangs"})
	all := append([]string{shot.Waiters[0].Owner, shot.Holders[4].ID}, ids...)
	for columns, wants := range map[int][]string{
		44:  nil,
		62:  {key},
		80:  {key, "REMAINING", "vm:26713:…2WXYZ", "vm:26713:…3WXYZ", "vm:26711:…2345 and 3 more"},
		100: {key, "REMAINING", "evicted by ada: hangs"},
		120: {key, "REMAINING", "KIND", "HELD FOR", "evicted by ada: hangs"},
	} {
		text, err := frame(false, shot, false, sheet{columns: columns, more: "w"})
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range append(wants, "MODE") {
			if !strings.Contains(text, want) {
				t.Errorf("%d columns do not show %q:\n%s", columns, want, text)
			}
		}
		if got := strings.Count(text, " shared "); got != len(ids) {
			t.Errorf("%d columns show %d shares of %d:\n%s", columns, got, len(ids), text)
		}
		for _, word := range regexp.MustCompile(`(vm|pod)\S*…\S*`).FindAllString(text, -1) {
			if found := slices.DeleteFunc(slices.Clone(all), func(id string) bool { return !shortens(word, id) }); len(found) != 1 {
				t.Errorf("%d columns: %q is that of %q:\n%s", columns, word, found, text)
			}
		}
	}
}

func TestLongNotesAreShortenedOnANarrowScreenAlone(t *testing.T) {
	t.Parallel()
	const metadata = "import of the big customer, started by cron"
	holders := []pgxlock.Holder{{Key: "k", Kind: pgxlock.KindLease, ID: "h", State: pgxlock.StateLive, Metadata: metadata}}
	for s, whole := range map[sheet]bool{{columns: 120, more: "--wide"}: false, {columns: 120}: true, {}: true} {
		var text strings.Builder
		if err := printHolders(&text, false, s, time.Now(), holders); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(text.String(), metadata) != whole || strings.Contains(text.String(), "shortened: NOTE (--wide shows all)") == whole {
			t.Errorf("%+v: %s", s, text.String())
		}
	}
}

// A terminal copies what it wraps itself as one word.
func TestWideTableBreaksNoWord(t *testing.T) {
	t.Parallel()
	shot := crowded()
	shot.Holders = append(shot.Holders, pgxlock.Holder{Key: "k", Kind: pgxlock.KindLease, ID: "h", State: pgxlock.StateLive})
	var text, rows strings.Builder
	if err := printHolders(&text, false, sheet{columns: 80}, shot.At, shot.Holders); err != nil {
		t.Fatal(err)
	}
	for _, h := range shot.Holders {
		for _, word := range []string{h.Key, h.ID, readable.Number(h.Token), readable.Number(h.PID), note(h)} {
			if !strings.Contains(text.String(), word) {
				t.Errorf("%q is not shown whole:\n%s", word, text.String())
			}
		}
	}
	if strings.Contains(text.String(), "\n\n") {
		t.Errorf("a line is empty:\n%s", text.String())
	}
	if err := printHolders(&rows, false, sheet{}, shot.At, shot.Holders); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(rows.String(), "\n"); got != 4 || strings.Contains(rows.String(), "…") {
		t.Errorf("a pipe gets %d lines:\n%s", got, rows.String())
	}
}

func TestIDsAreShortenedInTheMiddle(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		id      string
		columns int
		want    string
	}{
		{"vm:1:ABCDEFGHIJKLMNOPQRSTUVWXYZ", 31, "vm:1:ABCDEFGHIJKLMNOPQRSTUVWXYZ"},
		{"billing-x2v4q:4711:…WXYZ", 20, "bill…2v4q:4711:…WXYZ"},
		{"billing-x2v4q:4711:…WXYZ", 10, "bil…:…WXYZ"},
		{"orders-of-the-year-2025", 13, "orde…ear-2025"},
		{"注文:請求書:4711", 11, "注…書:4711"},
		{"abc", 2, "…c"},
		{"abc", 1, "…"},
	} {
		if got := readable.Shortened(test.id, test.columns); got != test.want || runewidth.StringWidth(got) > test.columns {
			t.Errorf("%q in %d columns: %q, want %q", test.id, test.columns, got, test.want)
		} else if whole := strings.ReplaceAll(test.id, "…", "ABCDEFGHIJKLMNOPQRSTUV"); got != whole && !shortens(got, whole) {
			t.Errorf("evict does not find %q by %q", whole, got)
		}
	}
}

func TestProseIsBrokenBetweenWords(t *testing.T) {
	t.Parallel()
	list := table{titles: []string{"ID", "TEXT"}, keys: []string{"ID"}, prose: "TEXT", extra: []string{"TEXT"}}
	var text strings.Builder
	rows := [][]cell{{{text: "one"}, {text: "hangs since the deploy of eleven o'clock"}}, {{text: "two"}, {text: ""}}}
	if err := list.print(&text, false, sheet{columns: 30, more: "--wide"}, rows); err != nil {
		t.Fatal(err)
	}
	const want = "ID   TEXT\none  hangs since the deploy of\n     eleven o'clock\ntwo\n"
	if text.String() != want {
		t.Errorf("%q, want %q", text.String(), want)
	}
}

func TestTreeIsBrokenBetweenWords(t *testing.T) {
	t.Parallel()
	shot := crowded()
	for _, p := range []palette{false, true} {
		var text strings.Builder
		if err := printTree(&text, p, 44, shot.At, shot.Waits().Tree()); err != nil {
			t.Fatal(err)
		}
		got := painted.ReplaceAllString(text.String(), "")
		want := fmt.Sprintf("注文:請求書:4711 (lease) held by\n      %s\n      for 1m0s\n  other-%s:22\n        waits for 12s, and 2 more in its\n        process\n", ofPod, longestPod)
		if got != want {
			t.Errorf("%s\nwant\n%s", got, want)
		}
	}
}
