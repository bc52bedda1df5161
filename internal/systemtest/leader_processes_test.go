//go:build unix

package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A leading is a moment at which a process believed that it leads.
type leading struct {
	Token int64
	At    int64 // nanoseconds since 1970, read before it looked
}

// candidates are the kinds of Locker that lead here.
var candidates = map[string]func(*pgxpool.Pool) (*pgxlock.Locker, error){
	"by a lease": func(pool *pgxpool.Pool) (*pgxlock.Locker, error) {
		return pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: time.Second})
	},
	"by an advisory lock": func(pool *pgxpool.Pool) (*pgxlock.Locker, error) {
		return pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{TTL: time.Second, Tokens: true})
	},
}

// campaign leads, and reports each moment at which it does, until SIGTERM.
func campaign(ctx context.Context, url, what string, report func(any) error) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	locks, err := candidates[what](pool)
	if err != nil {
		return err
	}
	if err := report(leading{}); err != nil { // it can be terminated from now on
		return err
	}
	err = locks.Lead(ctx, "leader", func(ctx context.Context, term *pgxlock.Lock) error {
		for {
			now := time.Now().UnixNano()
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if err := report(leading{term.Token(), now}); err != nil {
				return err
			}
			time.Sleep(time.Millisecond) // the work
		}
	})
	if !errors.Is(err, context.Canceled) {
		return fmt.Errorf("Lead: %w", err)
	}
	return locks.Close(context.WithoutCancel(ctx))
}

// terms collects what the children report.
type terms struct {
	mu    sync.Mutex
	of    map[int64]*tenure
	last  int64 // the greatest token
	by    *child
	moved chan struct{} // closed with the next report
}

// tenure is from when to when somebody led.
type tenure struct {
	from, to int64
	ended    string // what was done to it
}

// listen collects until the child ends.
func (ts *terms) listen(c *child) {
	for {
		var l leading
		if c.reports.Decode(&l) != nil {
			return
		}
		if l.Token == 0 {
			continue
		}
		ts.mu.Lock()
		if ts.of[l.Token] == nil {
			ts.of[l.Token] = &tenure{from: l.At}
		}
		ts.of[l.Token].to = max(ts.of[l.Token].to, l.At)
		if l.Token >= ts.last {
			ts.last, ts.by = l.Token, c
		}
		close(ts.moved)
		ts.moved = make(chan struct{})
		ts.mu.Unlock()
	}
}

// until waits for a report after which done is true.
func (ts *terms) until(t *testing.T, done func() bool) {
	t.Helper()
	for late := time.After(pgtest.Patience); ; {
		ts.mu.Lock()
		ok, moved := done(), ts.moved
		ts.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-moved:
		case <-late:
			t.Fatal("nobody leads any more")
		}
	}
}

// However a leader ends, nobody else leads while it believes that it does.
func TestSoakLeadersAreOneAtATimeWhateverHappensToThem(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for what := range candidates {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			server, db := privateServer(t, nil)
			ts := &terms{of: make(map[int64]*tenure), moved: make(chan struct{})}
			var listening sync.WaitGroup
			start := func() *child {
				c := startChild(t, "lead", db.URL, what)
				var ready leading
				c.report(t, &ready)
				listening.Go(func() { ts.listen(c) })
				return c
			}
			running := map[*child]bool{start(): true, start(): true, start(): true}
			// leader returns who leads now, and with which token.
			leader := func() (c *child, token int64) {
				now := time.Now().UnixNano()
				ts.until(t, func() bool {
					c, token = ts.by, ts.last
					return c != nil && running[c] && ts.of[token].to > now
				})
				return c, token
			}
			events := map[string]func(*child){
				"asked":   func(*child) { ask(t, what, db) },
				"SIGTERM": func(c *child) { c.signal(t, syscall.SIGTERM); c.end(t); delete(running, c) },
				"SIGKILL": func(c *child) { c.signal(t, syscall.SIGKILL); _ = c.cmd.Wait(); delete(running, c) },
				"SIGSTOP": func(c *child) { c.freeze(t) },
			}
			for range pgtest.Soak(t, 1, 4) {
				for name, event := range events {
					c, token := leader()
					event(c)
					ts.until(t, func() bool { return ts.last > token })
					ts.mu.Lock()
					ts.of[token].ended = name
					ts.mu.Unlock()
					if name == "SIGSTOP" {
						c.thaw(t) // it believes nothing any more
					}
					if !running[c] {
						running[start()] = true
					}
				}
				leader()
				if err := server.Restart(t.Context()); err != nil {
					t.Fatal(err)
				}
				db.Pool.Reset()
				leader()
			}
			for c := range running {
				c.signal(t, syscall.SIGTERM)
			}
			listening.Wait()

			tokens := slices.Sorted(maps.Keys(ts.of))
			gaps := make(map[string][]time.Duration)
			for i := 1; i < len(tokens); i++ {
				before, after := ts.of[tokens[i-1]], ts.of[tokens[i]]
				if after.from <= before.to {
					t.Errorf("term %d, which ended by %q, goes on until %d; the next one begins at %d", tokens[i-1], before.ended, before.to, after.from)
				}
				if before.ended != "" {
					gaps[before.ended] = append(gaps[before.ended], time.Duration(after.from-before.to))
				}
			}
			for name, gaps := range gaps {
				slices.Sort(gaps)
				t.Logf("%s: nobody led for %s (median), %s (99 of 100), %d times", name, gaps[len(gaps)/2], gaps[len(gaps)*99/100], len(gaps))
			}
		})
	}
}

// ask asks the leader to step down, as somebody else.
func ask(t *testing.T, what string, db *pgtest.DB) {
	t.Helper()
	locks, err := candidates[what](db.Pool)
	if err != nil {
		t.Fatal(err)
	}
	pgtest.Until(t, "it was asked", func() bool { // a session that may be silent for a second only may end meanwhile
		return locks.AskToStepDown(t.Context(), "leader") == nil
	})
	if err := locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
