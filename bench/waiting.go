package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock"
)

// These surveys are about waiting: what it takes to pass a lock on, and what a release
// costs for which nobody waits.

// passOn passes one lease among 16 workers of four Lockers, each with connections of
// its own, as processes have.
func passOn(ctx context.Context, s *stage) ([]finding, error) {
	pool, err := s.installed(ctx, "CREATE TABLE floor (key int PRIMARY KEY, value bigint); INSERT INTO floor VALUES (1, 0)")
	if err != nil {
		return nil, err
	}
	const lockers, workers, rounds = 4, 4, 150
	type turn struct {
		worker   int
		from, to time.Time
	}
	var (
		mu    sync.Mutex
		turns []turn
		crew  sync.WaitGroup
	)
	errs := make([]error, lockers*workers)
	begin := make(chan struct{})
	for i := range lockers {
		locks, err := s.locker(pool, nil)
		if err != nil {
			return nil, err
		}
		if err := locks.Do(ctx, fmt.Sprint("warm ", i), func(context.Context, *pgxlock.Lock) error { return nil }); err != nil {
			return nil, err
		}
		for j := range workers {
			worker := i*workers + j
			crew.Go(func() {
				<-begin
				for range rounds {
					errs[worker] = locks.Do(ctx, "shared", func(context.Context, *pgxlock.Lock) error {
						from := time.Now()
						mu.Lock()
						defer mu.Unlock()
						turns = append(turns, turn{worker, from, time.Now()})
						return nil
					})
					if errs[worker] != nil {
						return
					}
				}
			})
		}
	}
	close(begin)
	crew.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}

	// As long as nobody was through: after that fewer wait.
	served := make([]int, lockers*workers)
	var gaps []time.Duration
	for i, t := range turns {
		if i > 0 {
			gaps = append(gaps, t.from.Sub(turns[i-1].to))
		}
		served[t.worker]++
		if served[t.worker] == rounds {
			break
		}
	}
	slices.Sort(gaps)

	commits := make([]time.Duration, 500)
	for i := range commits {
		began := time.Now()
		if _, err := pool.Exec(ctx, "UPDATE floor SET value = value + 1 WHERE key = 1"); err != nil {
			return nil, err
		}
		commits[i] = time.Since(began)
	}
	slices.Sort(commits)
	at := func(sorted []time.Duration, percent int) float64 {
		return sorted[len(sorted)*percent/100].Seconds() * 1000
	}
	return []finding{
		{"hand-over, median", at(gaps, 50), "ms"},
		{"hand-over, 99 of 100 within", at(gaps, 99), "ms"},
		{"a durable commit, median", at(commits, 50), "ms"},
		{"least over most served", float64(slices.Min(served)) / float64(slices.Max(served)), ""},
	}, nil
}

// lookForNobody counts what a pair of leases asks of the server when nobody waits.
func lookForNobody(ctx context.Context, s *stage) ([]finding, error) {
	const pairs = 1000
	var findings []finding
	for _, c := range []struct{ what, word string }{
		{"statements that acquire and give back, for a pair", "each lease of a batch"},
		{"statements that look who waits, for a pair", "-- Wakes, for each lock"},
	} {
		count := &statements{word: c.word}
		traced, err := s.traced(ctx, count)
		if err != nil {
			return nil, err
		}
		locks, err := s.locker(traced, nil)
		if err != nil {
			return nil, err
		}
		for i := range pairs {
			lock, err := locks.Acquire(ctx, fmt.Sprint("free:", i))
			if err == nil {
				err = lock.Release(ctx)
			}
			if err != nil {
				return nil, err
			}
		}
		if err := locks.Close(ctx); err != nil {
			return nil, err
		}
		findings = append(findings, finding{c.what, float64(count.n.Load()) / pairs, ""})
	}

	pool, err := s.installed(ctx, "")
	if err != nil {
		return nil, err
	}
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Release()
	var plan []byte
	for range 10 { // the first ones read catalogs
		err := conn.QueryRow(ctx, "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT w.n FROM pgxlock_wake_batch('{0}', '{free:1}', '{NULL}') w").Scan(&plan)
		if err != nil {
			return nil, err
		}
	}
	var explained []struct {
		Plan struct {
			Hit  float64 `json:"Shared Hit Blocks"`
			Read float64 `json:"Shared Read Blocks"`
		}
	}
	if err := json.Unmarshal(plan, &explained); err != nil || len(explained) != 1 {
		return nil, fmt.Errorf("read the plan of a look: %w", err)
	}
	return append(findings, finding{"pages that such a look touches", explained[0].Plan.Hit + explained[0].Plan.Read, ""}), nil
}
