package stacks_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/examples/stacks"
)

// payers are the handlers of a payment.
func payers(t *testing.T) map[string]http.Handler {
	t.Helper()
	all := map[string]http.Handler{"pgx": stacks.Idempotent(stacks.PayWithPgx(database.pool))}
	for _, d := range drivers {
		all["database/sql, "+d.title] = stacks.Idempotent(stacks.PayWithSQL(d.open(t)))
	}
	return all
}

// post sends a request, and returns the status and the body of the response.
func post(t *testing.T, handler http.Handler, user, key, body string) (int, string) {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/payments", strings.NewReader(body))
	r.SetBasicAuth(user, "secret")
	r.Header.Set("Idempotency-Key", key)
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

// payments returns how many payments of an amount there are.
func payments(t *testing.T, amount int64) (n int) {
	t.Helper()
	if err := database.pool.QueryRow(t.Context(), "SELECT count(*) FROM payments WHERE amount = $1", amount).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestRepeatedPostReceivesTheFirstAnswer(t *testing.T) {
	t.Parallel()
	all := payers(t)
	for name, payer := range all {
		t.Run(name, func(t *testing.T) {
			amount := newID()
			body, key := fmt.Sprint(amount), fmt.Sprint("key ", amount)
			want := func(handler http.Handler, user, key, body string, want int) string {
				t.Helper()
				code, answer := post(t, handler, user, key, body)
				if code != want {
					t.Errorf("%q of %s, %q: %d %s, want %d", key, user, body, code, answer, want)
				}
				return answer
			}
			want(payer, "alice", "", body, http.StatusBadRequest)
			want(payer, "alice", key, "no amount", http.StatusServiceUnavailable)
			first := want(payer, "alice", key, body, http.StatusCreated) // what failed has left nothing
			for _, other := range all {
				if again := want(other, "alice", key, body, http.StatusCreated); again != first {
					t.Errorf("repeated: %s, want %s", again, first)
				}
			}
			want(payer, "alice", key, body+"0", http.StatusUnprocessableEntity)
			if n := payments(t, amount) + payments(t, amount*10); n != 1 {
				t.Errorf("%d payments", n)
			}
			if bobs := want(payer, "bob", key, body, http.StatusCreated); bobs == first {
				t.Errorf("bob received what alice did: %s", bobs)
			}

			// The first one is being done.
			tx, err := database.pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if first, err := pgxlock.ClaimTx(t.Context(), tx, fmt.Sprintf("pay:%q:%s", "carol", key)); err != nil || !first {
				t.Fatal(first, err)
			}
			want(payer, "carol", key, body, http.StatusConflict)
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			want(payer, "carol", key, body, http.StatusCreated)
		})
	}
}

// Clients that receive no response, or a 409, send the request again, to any instance.
func TestManyPostsOfOneKeyAreOnePayment(t *testing.T) {
	t.Parallel()
	amount := newID()
	var mu sync.Mutex
	answers := make(map[string]int)
	var clients sync.WaitGroup
	for _, payer := range payers(t) {
		for range 6 {
			clients.Go(func() {
				for {
					code, answer := post(t, payer, "alice", fmt.Sprint("race ", amount), fmt.Sprint(amount))
					if code == http.StatusConflict {
						continue
					}
					mu.Lock()
					defer mu.Unlock()
					answers[fmt.Sprint(code, " ", answer)]++
					return
				}
			})
		}
	}
	clients.Wait()
	if n := payments(t, amount); n != 1 || len(answers) != 1 {
		t.Errorf("%d payments; clients received %v", n, answers)
	}
}
