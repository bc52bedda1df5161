package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
)

// A table compares Lockers with several peers, and with each other, in one run:
// each way works on things of its own.
type table struct {
	name, about string
	contestants []contestant
	results     []result
}

// A contestant is a way of a table.
type contestant struct {
	name    string
	needs   *daemon // nil: PostgreSQL, which is there
	prepare func(context.Context, *stage) (op, error)
}

// A result is a ratio that a table shows, for some numbers of workers.
type result struct {
	system, peer string
	goals        map[int]float64 // by the number of workers; 0: none
}

// tables are all of them, in the order in which they are shown.
var tables = []table{
	{
		name: "pairs", about: "acquire and release, a new key each time; only leases and etcd are durable, advisory locks keep nothing on disk",
		contestants: []contestant{
			{name: "advisory", prepare: pairsOf(newSession)},
			{name: "advisory+tokens", prepare: pairsOf(newTokens)},
			{name: "lease", prepare: pairsOf(newLease)},
			{name: "floor", prepare: twoSelects},
			{name: "redislock", needs: redisServer, prepare: bsmRedislock},
			{name: "redsync", needs: redisServer, prepare: redsyncMutex},
			{name: "rueidis", needs: redisServer, prepare: pipelinedRedis},
			{name: "etcd", needs: etcdServer, prepare: etcdMutex},
		},
		results: []result{
			{"advisory", "floor", map[int]float64{1: 1.15}},
			{"advisory", "rueidis", map[int]float64{1: 0, 32: 1 / 1.6, 256: 1 / 4.5, 1024: 0}},
			{"advisory", "redislock", map[int]float64{1: 0, 32: 0, 256: 0, 1024: 0}},
			{"advisory", "redsync", map[int]float64{1: 0, 32: 0, 256: 0, 1024: 0}},
			{"advisory", "etcd", map[int]float64{1: 0, 32: 0, 256: 0, 1024: 0}},
			{"advisory+tokens", "lease", map[int]float64{1: 0, 32: 0, 256: 0}},
			{"lease", "redislock", map[int]float64{1: 0, 32: 1, 256: 0, 1024: 0}},
			{"lease", "redsync", map[int]float64{1: 0, 32: 0, 256: 0, 1024: 0}},
			{"lease", "rueidis", map[int]float64{1: 0, 32: 0, 256: 1, 1024: 0}},
			{"lease", "etcd", map[int]float64{1: 0, 32: 0, 256: 0, 1024: 0}},
		},
	},
}

// rows returns one for each number of workers that a result asks for.
func (t table) rows() []row {
	byWorkers := make(map[int][]ratio)
	for _, r := range t.results {
		for workers, goal := range r.goals {
			byWorkers[workers] = append(byWorkers[workers], ratio{r.system, r.peer, goal})
		}
	}
	daemons := make(map[string]*daemon)
	for _, c := range t.contestants {
		if c.needs != nil {
			daemons[c.name] = c.needs
		}
	}
	var rows []row
	for _, workers := range slices.Sorted(maps.Keys(byWorkers)) {
		rows = append(rows, row{
			title: t.name, about: t.about, workers: workers,
			ratios: byWorkers[workers], prepare: t.prepare, daemons: daemons,
		})
	}
	return rows
}

func (t table) prepare(ctx context.Context, s *stage, names []string) ([]way, error) {
	var ways []way
	for _, c := range t.contestants {
		if !slices.Contains(names, c.name) {
			continue
		}
		if c.needs != nil && c.needs.path == "" {
			fmt.Printf("  %s is left out: there is no %s\n", c.name, c.needs.called)
			continue
		}
		do, err := c.prepare(ctx, s)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		ways = append(ways, way{c.name, do})
	}
	return ways, nil
}
