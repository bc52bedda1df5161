package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// A survey counts what happens over a while, where there is no peer to compare
// with: statements, kinds of row versions, pages.
type survey struct {
	name  string
	about string
	take  func(ctx context.Context, s *stage, span time.Duration) ([]finding, []grid, error)
	needs []*daemon // of some of its ways
}

// counts is a survey that has no tables, and takes as long as it takes.
func counts(take func(ctx context.Context, s *stage) ([]finding, error)) func(context.Context, *stage, time.Duration) ([]finding, []grid, error) {
	return func(ctx context.Context, s *stage, _ time.Duration) ([]finding, []grid, error) {
		found, err := take(ctx, s)
		return found, nil, err
	}
}

// A finding is one number of a survey.
type finding struct {
	what  string
	value float64
	unit  string
}

// peers are the daemons of ways that wait.
var peers = []*daemon{redisServer, etcdServer}

// surveys are all of them, in the order in which they are shown.
var surveys = []survey{
	{"renewals", "10,000 leases held by one Locker; an interval is a third of the TTL; goal: <= 11 statements", counts(countRenewals), nil},
	{"hot", "100,000 renewals of 1,000 leases: the share that touched no index, at best 100 %", counts(shareOfHOT), nil},
	{"free", "1,000 pairs of leases, one after the other, for which nobody waits", counts(lookForNobody), nil},
	{"size", "100,000 acquires and releases of 100 names, autovacuum on", counts(sizeAfterCycles), nil},
	{"contended", "one key that all callers of several processes want", takeContended, peers},
	{"hand-over", "one key from a process to another one that waits for it", takeHandOver, peers},
	{"fleet", "processes with keys of their own", takeFleet, nil},
}

// measure takes the survey.
func (v survey) measure(ctx context.Context, server *pgserver.Server, span time.Duration) (found surveyed, err error) {
	s := newStage(server, 32)
	defer func() { err = errors.Join(err, s.clear()) }()
	found.survey = v
	found.findings, found.grids, err = v.take(ctx, s, span)
	return found, err
}

// print prints the outcome of a survey.
func (s surveyed) print() {
	for _, g := range s.grids {
		g.print()
	}
	for _, f := range s.findings {
		fmt.Printf("FIGURE %s, %s: %.4g %s\n", s.name, f.what, f.value, f.unit)
	}
}

// statements counts those whose text contains a word.
type statements struct {
	word string
	n    atomic.Int64
}

func (c *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, c.word) {
		c.n.Add(1)
	}
	return ctx
}

func (c *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// traced is an installed database whose statements are counted.
func (s *stage) traced(ctx context.Context, count *statements) (*pgxpool.Pool, error) {
	pool, err := s.installed(ctx, "")
	if err != nil {
		return nil, err
	}
	config := pool.Config()
	config.ConnConfig.Tracer = count
	traced, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	s.cleanup(func() error { traced.Close(); return nil })
	return traced, nil
}

func countRenewals(ctx context.Context, s *stage) ([]finding, error) {
	renewals := &statements{word: "-- Renews each lease"}
	traced, err := s.traced(ctx, renewals)
	if err != nil {
		return nil, err
	}
	const ttl, intervals = 9 * time.Second, 3
	locks, err := s.locker(traced, &pgxlock.LeaseConfig{TTL: ttl})
	if err != nil {
		return nil, err
	}
	held, err := hold(ctx, locks, 10_000)
	if err != nil {
		return nil, err
	}
	before := renewals.n.Load()
	select { // what is counted is what happens by itself in that time
	case <-time.After(intervals * ttl / 3):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	count := renewals.n.Load() - before
	for _, lock := range held {
		if err := lock.Err(); err != nil {
			return nil, err
		}
	}
	return []finding{{"statements for each interval", float64(count) / intervals, ""}}, nil
}

// hold acquires n leases, as many at a time as fill a batch.
func hold(ctx context.Context, locks *pgxlock.Locker, n int) ([]*pgxlock.Lock, error) {
	held := make([]*pgxlock.Lock, n)
	errs := make([]error, 256)
	var crew sync.WaitGroup
	for worker := range errs {
		crew.Go(func() {
			for i := worker; i < n && errs[worker] == nil; i += len(errs) {
				held[i], errs[worker] = locks.TryAcquire(ctx, fmt.Sprint("held:", i))
			}
		})
	}
	crew.Wait()
	return held, errors.Join(errs...)
}

func shareOfHOT(ctx context.Context, s *stage) ([]finding, error) {
	var findings []finding
	for _, old := range []bool{false, true} {
		share, err := renewedHOT(ctx, s, old)
		if err != nil {
			return findings, err
		}
		what := "no old snapshot"
		if old {
			what = "a snapshot as old as the leases"
		}
		findings = append(findings, finding{what, 100 * share, "%"})
	}
	return findings, nil
}

// renewedHOT returns which share of renewals were heap-only updates.
func renewedHOT(ctx context.Context, s *stage, oldSnapshot bool) (share float64, err error) {
	pool, err := s.installed(ctx, "")
	if err != nil {
		return 0, err
	}
	locks, err := s.locker(pool, &pgxlock.LeaseConfig{TTL: time.Hour}) // renewed by us only
	if err != nil {
		return 0, err
	}
	held, err := hold(ctx, locks, 1000)
	if err != nil {
		return 0, err
	}
	if oldSnapshot {
		tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		if err != nil {
			return 0, err
		}
		s.cleanup(func() error { return tx.Rollback(context.Background()) })
		if _, err := tx.Exec(ctx, "SELECT count(*) FROM distributed_locks"); err != nil {
			return 0, err
		}
	}
	const rounds = 100
	for range rounds {
		errs := make([]error, len(held))
		var crew sync.WaitGroup
		for i, lock := range held {
			crew.Go(func() { errs[i] = lock.Renew(ctx) })
		}
		crew.Wait()
		if err := errors.Join(errs...); err != nil {
			return 0, err
		}
	}
	if err := locks.Close(ctx); err != nil { // its connections then report what they did
		return 0, err
	}
	var updates, hot int64
	for updates < rounds*int64(len(held)) {
		err := pool.QueryRow(ctx, "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'distributed_locks'").Scan(&updates, &hot)
		if err != nil {
			return 0, err
		}
	}
	return float64(hot) / float64(updates), nil
}

func sizeAfterCycles(ctx context.Context, s *stage) ([]finding, error) {
	pool, err := s.installed(ctx, "")
	if err != nil {
		return nil, err
	}
	locks, err := s.locker(pool, nil)
	if err != nil {
		return nil, err
	}
	const cycles, names = 100_000, 100
	errs := make([]error, names)
	var crew sync.WaitGroup
	for i := range names {
		crew.Go(func() {
			for range cycles / names {
				lock, err := locks.TryAcquire(ctx, fmt.Sprint("name:", i))
				if err == nil {
					err = lock.Release(ctx)
				}
				if err != nil {
					errs[i] = err
					return
				}
			}
		})
	}
	crew.Wait()
	var table, all int64
	err = errors.Join(errors.Join(errs...),
		pool.QueryRow(ctx, "SELECT pg_relation_size('distributed_locks'), pg_total_relation_size('distributed_locks')").Scan(&table, &all))
	return []finding{
		{"the table", float64(table) / 1024, "kB"},
		{"with its indexes and maps", float64(all) / 1024, "kB"},
	}, err
}
