package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/serve"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// The command evictions lists who took locks away from whom, and why.

func newEvictions() *cobra.Command {
	var m monitoring
	var output format
	var limit int
	var within time.Duration
	cmd := &cobra.Command{
		Use:   "evictions",
		Short: "List who evicted whom, and why",
		Long: `List the recorded evictions, the newest first: when, which lock, from which holder, by
whom and why. The last 1000 are kept. Of an advisory lock the holder is its process, with
its application as long as the session lives, and the key its number unless evict knew it:
--name shows it. The record says that its session was asked or ended; evict reports
whether the lock was released.`,
		Example: `  pgxlock evictions --limit 10
  pgxlock evictions --since 24h -o json | jq -r '.[].eviction_reason'`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			flags := cmd.Flags()
			if flags.Changed("limit") && limit <= 0 {
				return usageError{fmt.Errorf("--limit is %d, it must be more than 0", limit)}
			}
			if flags.Changed("since") && within <= 0 {
				return usageError{fmt.Errorf("--since is %s, it must be more than 0", within)}
			}
			pool, _, err := m.open(cmd.Context(), reading)
			if err != nil {
				return err
			}
			defer pool.Close()
			list, err := evictions(cmd.Context(), pool, &m, limit, within)
			if err != nil {
				return err
			}
			if output == formatJSON {
				return printJSON(cmd.OutOrStdout(), views(list, viewEviction))
			}
			return printEvictions(cmd.OutOrStdout(), colors(cmd), sheetOf(cmd), list)
		},
	}
	m.addFlags(cmd)
	output.addFlag(cmd)
	addWideFlag(cmd)
	cmd.Flags().IntVar(&limit, "limit", 0, "at most this `number`, the newest (default: all)")
	durationVar(cmd.Flags(), &within, "since", "", 0, "only those of the last 24h, or another `duration` (default: all)")
	return cmd
}

// evictions returns the last evictions, the newest first: at most so many, unless it is 0, and
// only those since so long ago, unless it is 0.
func evictions(ctx context.Context, pool *pgxpool.Pool, m *monitoring, limit int, within time.Duration) ([]serve.Eviction, error) {
	var most *int
	if limit > 0 {
		most = &limit
	}
	var age *float64
	if within > 0 {
		age = new(within.Seconds())
	}
	text := func(schema string) string { return statement("evictions", schema) }
	return rowsOf(ctx, pool, m.target.schema, text, []any{most, age}, func(row pgx.CollectableRow) (e serve.Eviction, err error) {
		var kind int32
		var name string
		var named bool
		var at pgtype.Timestamptz
		var application string
		err = row.Scan(&kind, &name, &named, &e.Holder, &at, &e.By, &e.Reason, &application)
		e.Key, e.Kind, e.At = name, pgxlock.KindLease, at.Time
		if kind != 0 {
			e.Kind = pgxlock.KindAdvisory
			e.Holder = ofSession(e.Holder) + after(" of ", application)
		}
		if n, err := strconv.ParseInt(name, 10, 64); err == nil && kind != 0 && !named {
			id := lockkey.ID{Number: n, Pair: kind == 2}
			e.Key, _ = lockkey.Split(id.Key())
			if i := slices.IndexFunc(m.names, func(known string) bool { return lockkey.Identify(typed(known)) == id }); i >= 0 {
				e.Key, _ = lockkey.Split(typed(m.names[i]))
			}
		}
		return e, err
	})
}

// ofSession names the session that an eviction records as advisory:pid:kind:key.
func ofSession(holder string) string {
	if parts := strings.Split(holder, ":"); len(parts) == 4 {
		return "process " + parts[1]
	}
	return holder
}

// evictionView is an eviction as JSON shows it.
type evictionView struct {
	Key     string    `json:"key"`
	Kind    lockKind  `json:"kind"`
	Holder  string    `json:"holder"`
	Evicted time.Time `json:"evicted_at"`
	By      string    `json:"evicted_by"`
	Reason  string    `json:"eviction_reason"`
}

func viewEviction(e serve.Eviction) evictionView {
	return evictionView{e.Key, kindNamed(e.Kind), e.Holder, e.At, e.By, e.Reason}
}

var evictionTable = table{
	titles:  []string{"EVICTED AT", "KEY", "KIND", "HOLDER", "BY", "REASON"},
	holders: []string{"HOLDER"},
	keys:    []string{"KEY"},
	prose:   "REASON",
	extra:   []string{"REASON", "KIND", "BY"},
}

func printEvictions(w io.Writer, p palette, s sheet, list []serve.Eviction) error {
	rows := make([][]cell, len(list))
	for i, e := range list {
		rows[i] = []cell{
			{text: e.At.Local().Format(time.RFC3339)},
			{text: printable(e.Key)},
			{text: string(kindNamed(e.Kind))},
			{text: printable(e.Holder)},
			{text: printable(e.By)},
			{text: printable(e.Reason)},
		}
	}
	return evictionTable.print(w, p, s, rows)
}
