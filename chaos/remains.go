package main

import (
	"context"
	_ "embed"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

//go:embed sql/connections.sql
var connectionsSQL string

//go:embed sql/left.sql
var leftSQL string

//go:embed sql/rows.sql
var rowsSQL string

// countConnections writes how many connections each Locker, Limiter and Runner has, until ctx ends. Only what two counts
// in a row have found counts: a connection that was closed may not have ended at the server.
func countConnections(ctx context.Context, s *stage, w *history.Writer) {
	limit := 3
	switch s.plan.Kind {
	case "limit", "once":
		limit = 1
	default:
		if s.plan.OneConnection && s.plan.Kind != "advisory" {
			limit = 2
		}
	}
	before := map[string]int{}
	for sleep(ctx, 500*time.Millisecond) {
		counted := map[string]int{}
		rows, err := s.admin().Query(ctx, connectionsSQL)
		if err != nil {
			continue // there may be no server
		}
		var name string
		var n int
		if _, err := pgx.ForEachRow(rows, []any{&name, &n}, func() error { counted[name] = n; return nil }); err != nil {
			continue
		}
		for _, name := range slices.Sorted(maps.Keys(counted)) {
			target, _, _ := strings.Cut(strings.TrimPrefix(name, "pgxlock "), ".")
			w.Write(history.Event{What: history.Connections, Target: target, N: min(counted[name], before[name]), Limit: limit})
		}
		before = counted
	}
}

// writeRemains writes the rows that workers wrote, and what is left of locks once all of them can have ended: after the
// TTL, but at once if nothing is left.
func writeRemains(ctx context.Context, s *stage, w *history.Writer, killed []string) error {
	deadline := time.Now().Add(s.plan.TTL + 10*time.Second) // the second part is for servers and clocks
	for {
		left, err := lookForRemains(ctx, s, killed)
		rest := 0
		for _, e := range left {
			rest += e.N
		}
		// An error is what is left of a fault, such as a full lock table.
		if (err != nil || rest > 0) && time.Now().Before(deadline) && sleep(ctx, 100*time.Millisecond) {
			continue
		}
		if err != nil {
			return err
		}
		for _, e := range left {
			w.Write(e)
		}
		break
	}
	rows, err := s.admin().Query(ctx, rowsSQL)
	if err != nil {
		return err
	}
	e := history.Event{What: history.Row}
	_, err = pgx.ForEachRow(rows, []any{&e.Position, &e.Process, &e.Op, &e.Write, &e.Key, &e.Token}, func() error {
		w.Write(e)
		return nil
	})
	return err
}

func lookForRemains(ctx context.Context, s *stage, killed []string) ([]history.Event, error) {
	rows, err := s.admin().Query(ctx, leftSQL, killed, s.pooler == nil)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (history.Event, error) {
		e := history.Event{What: history.Left}
		return e, row.Scan(&e.Err, &e.N)
	})
}
