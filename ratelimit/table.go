package ratelimit

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/sql"
)

// A request is n events that a caller wants, or gives back.
type request struct {
	key    string
	n      int
	noWait bool
	until  time.Time // the latest that they may happen; zero: no bound
	unused *int64    // what they were answered that are given back

	batcher.Future
	got answer
}

// An answer is what became of a request: a row of limit.sql.
type answer struct {
	Granted bool
	Delay   time.Duration
	TAT     int64
}

// maxDelay is how long the events of a request may be delayed from now.
func (r *request) maxDelay(now time.Time) time.Duration {
	switch {
	case r.noWait:
		return 0
	case r.until.IsZero():
		return maxLimitTime
	}
	return min(max(r.until.Sub(now), 0), maxLimitTime)
}

// A table is the backend of a Limiter with a server.
type table struct {
	rule    rule
	place   dbconn.Installation
	session *dbconn.Session
	closing context.Context // ends with the Limiter: then requests wait no longer for a connection
	asking  batcher.Batcher[*request]
	reaping batcher.Housekeeping
}

func newTable(closing context.Context, connections *pgxpool.Config, r rule, config *Config) (*table, error) {
	var cfg Config
	if config != nil {
		cfg = *config
	}
	if err := place.CheckName(cfg.Schema); err != nil {
		return nil, fmt.Errorf("ratelimit.Config.Schema %.80q %w", cfg.Schema, err)
	}
	owner, err := lockkey.Owner("ratelimit.Config", cfg.Owner)
	if err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	t := &table{rule: r, closing: closing, place: dbconn.Installation{Asked: cfg.Schema, Config: "ratelimit.Config"}}
	t.session = &dbconn.Session{Dialer: dbconn.Dialer{Name: dbconn.ApplicationName(owner), Config: connections}, Place: &t.place}
	t.asking = batcher.Batcher[*request]{Limit: batcher.MaxRequests, Run: t.decide, Fail: func(requests []*request, err error) {
		for _, r := range requests {
			r.Answer(err)
		}
	}}
	t.reaping = batcher.Housekeeping{Reap: t.reap, Log: cfg.Logger}
	return t, nil
}

func (t *table) ask(requests ...*request) { t.asking.Add(requests...) }

func (t *table) close() {
	t.reaping.Stop()
	<-t.asking.Done()
	t.session.Close()
}

// decide sends a batch of requests.
func (t *table) decide(requests []*request) error {
	var batch []*request
	var keys []string
	var counts []int32
	for _, r := range requests {
		if r.unused == nil && r.Settled() {
			continue // the caller left while it stood in the queue
		}
		batch = append(batch, r)
		keys = append(keys, r.key)
		counts = append(counts, int32(r.n))
	}
	if len(batch) == 0 {
		return nil
	}
	// What others ask for behind it waits as long as it does.
	patience := "100ms"
	parts := byKey(batch)
	if len(parts) == 1 {
		patience = "500ms"
	}
	var answers []answer
	err := t.session.Do(t.closing, dbconn.Timeout, func(ctx context.Context, q dbconn.Querier, again bool) (err error) {
		delays, unused := make([]int64, len(batch)), make([]*int64, len(batch))
		for i, r := range batch {
			delays[i] = r.maxDelay(time.Now()).Nanoseconds()
			if unused[i] = r.unused; again && r.unused != nil {
				unused[i] = new(int64) // it may have been given back, and twice would be too much
			}
		}
		answers, err = pgx.CollectRows(q.Query(ctx, t.place.Statement(statements.RatelimitTake), t.rule.step.Nanoseconds(), t.rule.burst, keys, counts, delays, unused, patience),
			pgx.RowToStructByPos[answer])
		return err
	})
	if err == nil && len(answers) != len(batch) {
		err = fmt.Errorf("%d answers for %d requests", len(answers), len(batch))
	}
	if len(parts) > 1 && (lockerr.Spoilt(err) || rowLocked(err)) {
		for i, part := range parts { // one of the keys spoils it: find out which
			if err := t.decide(part); err != nil {
				for _, rest := range parts[i+1:] {
					t.asking.Fail(rest, err)
				}
				return err
			}
		}
		return nil
	}
	if rowLocked(err) {
		err = fmt.Errorf("another transaction has the key's row locked, for example one that called allow_rate and is still open: %w", err)
	}
	for i, r := range batch {
		if err == nil {
			r.got = answers[i]
		}
		if !r.Answer(err) && err == nil && r.unused == nil && r.got.Granted {
			t.ask(&request{key: r.key, n: r.n, unused: &r.got.TAT, Future: batcher.NewFuture()})
		}
	}
	if err != nil && !t.session.Reached() {
		return err
	}
	t.reaping.Start()
	return nil
}

// rowLocked reports whether the wait for a row failed. What we run locks rows in the
// order of their keys and so is never in a deadlock by itself: one is with somebody else's
// transaction, such as one that called allow_rate for several keys.
func rowLocked(err error) bool {
	state := lockerr.SQLState(err)
	return state == lockerr.StateLockNotAvailable || state == lockerr.StateDeadlock
}

// byKey divides requests by their keys, each in the order in which they came.
func byKey(requests []*request) (parts [][]*request) {
	where := make(map[string]int)
	for _, r := range requests {
		i, known := where[r.key]
		if !known {
			i = len(parts)
			where[r.key], parts = i, append(parts, nil)
		}
		parts[i] = append(parts[i], r)
	}
	return parts
}

// reap removes the keys that have used nothing lately, some pages of the table at a
// time, so that nobody waits for all of it.
func (t *table) reap() error {
	page := new(int32)
	for page != nil {
		err := t.session.Do(t.closing, dbconn.Timeout, func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
			next, err := pgx.CollectExactlyOneRow(q.Query(ctx, t.place.Statement(statements.RatelimitReap), *page), pgx.RowTo[*int32])
			if err == nil {
				page = next
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}
