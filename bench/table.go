package main

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/pgxlock/pgxlock"
)

// A table compares Lockers with several peers, and with each other, in one run:
// each way works on things of its own.
type table struct {
	name, about string
	contestants []contestant
}

// A contestant is a way of a table.
type contestant struct {
	name    string
	needs   *daemon // nil: PostgreSQL, which is there
	prepare func(context.Context, *stage) (op, error)
	against []against // a peer has none
}

// against is what a way is compared with, for some numbers of workers.
type against struct {
	peer    string
	workers []int
}

// tables are all of them, in the order in which they are shown.
var tables = []table{
	{
		name: "pairs", about: "acquire and release, a new key each time; only leases, etcd and the peers with -aof are durable, advisory locks keep nothing on disk",
		contestants: []contestant{
			{name: "advisory", prepare: pairsOf(newSession), against: []against{
				{"floor", []int{1}},
				{"rueidis", []int{1, 32, 256, 1024}},
				{"redislock", []int{1, 32, 256, 1024}},
				{"redsync", []int{1, 32, 256, 1024}},
				{"etcd", []int{1, 32, 256, 1024}},
			}},
			{name: "advisory+tokens", prepare: pairsOf(newTokens), against: []against{{"lease", []int{1, 32, 256}}}},
			{name: "lease", prepare: pairsOf(leaseWith(nil)), against: []against{
				{"redislock", []int{1, 32, 256, 1024}},
				{"redsync", []int{1, 32, 256, 1024}},
				{"rueidis", []int{1, 32, 256, 1024}},
				{"etcd", []int{1, 32, 256, 1024}},
				{"redislock-aof", []int{1, 32, 256}},
				{"rueidis-aof", []int{1, 32, 256}},
			}},
			{name: "lease-async", prepare: pairsOf(leaseWith(&pgxlock.LeaseConfig{Durability: pgxlock.Async})), against: []against{{"rueidis", []int{1, 32, 256}}}},
			{name: "floor", prepare: twoSelects},
			{name: "redislock", needs: redisServer, prepare: bsmRedislock(redisServer)},
			{name: "redislock-aof", needs: durableRedis, prepare: bsmRedislock(durableRedis)},
			{name: "redsync", needs: redisServer, prepare: redsyncMutex},
			{name: "rueidis", needs: redisServer, prepare: pipelinedRedis(redisServer)},
			{name: "rueidis-aof", needs: durableRedis, prepare: pipelinedRedis(durableRedis)},
			{name: "etcd", needs: etcdServer, prepare: etcdMutex},
		},
	},
}

// rows returns one for each number of workers that a ratio asks for.
func (t table) rows() []row {
	byWorkers := make(map[int][]ratio)
	daemons := make(map[string]*daemon)
	for _, c := range t.contestants {
		if c.needs != nil {
			daemons[c.name] = c.needs
		}
		for _, a := range c.against {
			for _, workers := range a.workers {
				byWorkers[workers] = append(byWorkers[workers], ratio{c.name, a.peer})
			}
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
		w := s.way(c.name, do)
		if c.needs != nil {
			w.server = s.pids[c.needs]
		}
		ways = append(ways, w)
	}
	return ways, nil
}
