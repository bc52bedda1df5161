package main

import (
	"context"
	"encoding/json"
	"fmt"
)

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
