package serve

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"unicode"

	"github.com/pgxlock/pgxlock"
)

// FuzzRequests reads what a browser may send: a search, the holder in a form, and headers.
func FuzzRequests(f *testing.F) {
	f.Add("q=a+b&kind=lease&holders=2", holding(pgxlock.Holder{Key: "k", Kind: pgxlock.KindLease, ID: "me", Token: 1}), "Jürgen")
	f.Add("q=%ff&waiters=-1&expired=99999999999999999999", "eyJLZXkiOiIifQ", "\u009b\"\xff")
	f.Add("%zz;", "W1tbW1s", strings.Repeat(",", 1000))
	f.Fuzz(func(t *testing.T, search, form, header string) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		r.URL.RawQuery = search
		q := parseQuery(r)
		link, err := url.Parse(q.link("", 0))
		if err != nil {
			t.Fatal(err)
		}
		r.URL = link
		if again := parseQuery(r); again.link("", 0) != link.String() || len(again.words) != len(q.words) {
			t.Errorf("%q leads to %s, and that to %s", search, link, again.link("", 0))
		}
		if h, err := holder(form); err == nil {
			if again, err := holder(holding(h)); err != nil || again.Key == "" || holding(again) != holding(h) {
				t.Errorf("%q: %+v, then %+v: %v", form, h, again, err)
			}
		}
		for _, name := range []string{"X-Forwarded-For", "X-Forwarded-User"} {
			r.Header.Set(name, header)
		}
		if shown := from(r); len(shown) > longestFrom || strings.ContainsFunc(shown, func(r rune) bool { return r > '~' || !unicode.IsPrint(r) }) {
			t.Errorf("%q is shown as %q", header, shown)
		}
	})
}
