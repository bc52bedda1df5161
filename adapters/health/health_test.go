package health_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/adapters/health"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// answer is the status with which the handler answers.
func answer(t *testing.T, h http.Handler) int {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	return w.Code
}

func TestLeaderAnswers200ExactlyWhileItLeads(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	open := func() *pgxlock.Locker {
		locks, err := pgxlock.NewLeaseLocker(db.Pool, &pgxlock.LeaseConfig{TTL: time.Hour}) // which no pause of a machine exceeds
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { locks.Close(context.Background()) })
		return locks
	}
	locks, others := open(), open()
	leader, candidate := health.Leader(locks, "k"), health.Leader(others, "k")
	is := func(when string, h http.Handler, want int) {
		t.Helper()
		if got := answer(t, h); got != want {
			t.Errorf("%s: %d, want %d", when, got, want)
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	type term struct {
		context.Context
		lock *pgxlock.Lock
	}
	terms := make(chan term)
	goOn := make(chan struct{})
	ended := make(chan error, 2)
	for _, l := range []*pgxlock.Locker{locks, others} {
		is("before it is a candidate", health.Leader(l, "k"), http.StatusServiceUnavailable)
		go func() {
			ended <- l.Lead(ctx, "k", func(ctx context.Context, lock *pgxlock.Lock) error {
				terms <- term{ctx, lock}
				<-ctx.Done()
				<-goOn
				return nil
			})
		}()
		if l == locks {
			first := <-terms
			is("while it leads", leader, http.StatusOK)
			is("for another key", health.Leader(locks, "else"), http.StatusServiceUnavailable)
			defer func() { is("after all", leader, http.StatusServiceUnavailable) }()
			db.Exec(t, "select evict_lock(lock_name, holder_id, fencing_token, 'why') from lock_leases where lock_name = 'k'")
			if err := first.lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrEvicted) { // or it would notice later
				t.Errorf("a renewal after the eviction: %v", err)
			}
			is("while the function of a lost term goes on", leader, http.StatusServiceUnavailable)
		}
	}
	second := <-terms // of the other one: the first has not returned
	is("while the other one leads", leader, http.StatusServiceUnavailable)
	is("while it leads", candidate, http.StatusOK)
	goOn <- struct{}{} // the first is a candidate again
	if err := locks.AskToStepDown(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	<-second.Done()
	is("once it was asked to step down", candidate, http.StatusServiceUnavailable)
	goOn <- struct{}{}
	<-terms
	stop()
	close(goOn)
	for range 2 {
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

func TestLeaderWithoutALockerAnswers503(t *testing.T) {
	t.Parallel()
	if got := answer(t, health.Leader(nil, "k")); got != http.StatusServiceUnavailable {
		t.Errorf("it answers %d", got)
	}
}

// A load balancer sends requests to the process that leads.
func ExampleLeader() {
	locks := pgxlock.NewMemoryLocker()
	handler := health.Leader(locks, "scheduler")
	ask := func() {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/leader", nil))
		fmt.Print(w.Code, " ", w.Body)
	}
	ask()
	err := locks.Lead(context.Background(), "scheduler", func(context.Context, *pgxlock.Lock) error {
		ask()
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	ask()
	// Output:
	// 503 not the leader
	// 200 leader
	// 503 not the leader
}
