package serve

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const rightToken = "f1d2d2f924e986ac86fdf7b36c94bcdf"

// A guarded server has a token and keeps its log. It asks no database.
type guarded struct {
	*Server
	mu    sync.Mutex
	lines []string
}

func newGuarded(t *testing.T) *guarded {
	t.Helper()
	g := new(guarded)
	page, err := New(Config{Token: rightToken, Log: func(text string) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.lines = append(g.lines, text)
	}})
	if err != nil {
		t.Fatal(err)
	}
	g.Server = page
	return g
}

func (g *guarded) ask(r *http.Request) (code int, took time.Duration) {
	began := time.Now()
	r.Host = "localhost"
	answer := httptest.NewRecorder()
	g.ServeHTTP(answer, r)
	return answer.Code, time.Since(began)
}

func logIn(ctx context.Context, token string) *http.Request {
	r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/login", strings.NewReader(url.Values{"token": {token}}.Encode()))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	return r
}

func ofProgram(ctx context.Context, authorization string) *http.Request {
	r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/api/snapshot", nil)
	r.Header.Set("Authorization", authorization)
	return r
}

func TestWrongTokenCostsASecondAndIsLogged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const wrong = "0123456789abcdef0123456789abcdef"
		for name, r := range map[string]*http.Request{"form": logIn(t.Context(), wrong), "program": ofProgram(t.Context(), "Bearer "+wrong)} {
			g := newGuarded(t)
			r.RemoteAddr = "10.0.0.7:4711"
			r.Header.Add("X-Forwarded-For", "1.1.1.1")
			r.Header.Add("X-Forwarded-For", "1.1.1.1, 3.3.3.3, 2.2.2.2")
			r.Header.Set("X-Forwarded-User", "ali\u009bce\n"+strings.Repeat("\u202e", 1000))
			if code, took := g.ask(r); code != http.StatusUnauthorized || took != time.Second {
				t.Errorf("%s: %d after %s", name, code, took)
			}
			if len(g.lines) != 1 {
				t.Fatalf("%s: %q", name, g.lines)
			}
			line := g.lines[0]
			if want := `wrong token from 10.0.0.7, X-Forwarded-For "2.2.2.2", X-Forwarded-User "ali\u009bce\n\u202e`; !strings.HasPrefix(line, want) {
				t.Errorf("%s: %s", name, line)
			}
			if len(line) > 300 || strings.Contains(line, wrong) || strings.ContainsFunc(line, func(r rune) bool { return r < ' ' || r > '~' }) {
				t.Errorf("%s: %q", name, line)
			}
		}
		g := newGuarded(t)
		for _, authorization := range []string{"", "Bearer ", "Basic eDp5"} { // none of them guesses
			if code, took := g.ask(ofProgram(t.Context(), authorization)); code != http.StatusUnauthorized || took != 0 || len(g.lines) > 0 {
				t.Errorf("%q: %d after %s, %q", authorization, code, took, g.lines)
			}
		}
	})
}

func TestRightTokenDoesNotWaitForAFloodOfWrongOnes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		const flood = 500
		var mu sync.Mutex
		answered := make(map[int]map[time.Duration]int) // how many with that code after so long
		var all sync.WaitGroup
		guess := func(ctx context.Context) {
			all.Go(func() {
				code, took := g.ask(logIn(ctx, "wrong"))
				mu.Lock()
				defer mu.Unlock()
				if answered[code] == nil {
					answered[code] = make(map[time.Duration]int)
				}
				answered[code][took]++
			})
		}
		for range flood {
			guess(t.Context())
		}
		synctest.Wait()
		mu.Lock()
		if n := answered[http.StatusTooManyRequests][0]; n != flood-mostGuesses {
			t.Errorf("%d were refused at once, want all but %d: %v", n, mostGuesses, answered)
		}
		mu.Unlock()
		if code, took := g.ask(logIn(t.Context(), rightToken)); code != http.StatusSeeOther || took != 0 {
			t.Errorf("the right token: %d after %s", code, took)
		}
		all.Wait()
		if n := answered[http.StatusUnauthorized][time.Second]; n != mostGuesses {
			t.Errorf("%v", answered)
		}
		if n := len(g.lines); n != mostGuesses+1 || g.lines[n-1] != "484 more wrong tokens, refused at once" {
			t.Errorf("%q", g.lines)
		}

		// A client that leaves makes room.
		ctx, leave := context.WithCancel(t.Context())
		for range mostGuesses {
			guess(ctx)
		}
		synctest.Wait()
		leave()
		synctest.Wait()
		if code, took := g.ask(logIn(t.Context(), "wrong")); code != http.StatusUnauthorized || took != time.Second {
			t.Errorf("%d after %s", code, took)
		}
	})
}
