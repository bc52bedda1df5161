package main

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// A gauge is a counter of the server that shows what a way uses up besides time.
type gauge struct {
	name string
	sql  string // returns the counter, as a bigint
}

// measure returns by how much each operation of every way moves the counter.
func (g *gauge) measure(ctx context.Context, c contest) ([]wayGauge, error) {
	var gauged []wayGauge
	for _, w := range c.ways {
		each, err := g.perOp(ctx, c, w)
		if err != nil {
			return nil, err
		}
		gauged = append(gauged, wayGauge{w.name, each})
	}
	return gauged, nil
}

func (g *gauge) perOp(ctx context.Context, c contest, w way) (float64, error) {
	before, err := g.read(ctx, c.stage)
	if err != nil {
		return 0, err
	}
	done, err := c.run(ctx, w)
	if err != nil {
		return 0, err
	}
	after, err := g.read(ctx, c.stage)
	return float64(after-before) / float64(done.all), err
}

// read reads the counter on a connection of its own: s may have none to spare.
func (g *gauge) read(ctx context.Context, s *stage) (n int64, err error) {
	conn, err := pgx.Connect(ctx, s.server.URL(maintenance))
	if err != nil {
		return 0, err
	}
	defer conn.Close(ctx)
	// The control file, where some counters stand, is as old as the last checkpoint.
	if _, err := conn.Exec(ctx, "CHECKPOINT"); err != nil {
		return 0, err
	}
	err = conn.QueryRow(ctx, g.sql).Scan(&n)
	return n, err
}

// multiXactMembers are what several transactions that lock one row at a time are
// recorded by: one for each of them, again whenever another one joins. There are
// 2^32 of them until a VACUUM has to freeze the tables.
var multiXactMembers = &gauge{
	name: "MultiXact members",
	sql:  "SELECT next_multi_offset::text::bigint FROM pg_control_checkpoint()",
}
