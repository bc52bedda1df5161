package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
)

func newLs() *cobra.Command {
	var t target
	var output format
	var f filter
	var exitCode bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the leases",
		Long: `List the leases: who holds each of them, for how long already, and for how much longer
unless it is renewed. A shared lease has one line per holder. Filters are combined
with AND. Advisory locks are not leases: pgxlock watch shows them.

STATE is live, expired (others may take the lease over), or abandoned (expired more than
an hour ago). HELD FOR of an expired lease ends at its expiry. A lease that evict
took away is listed with the reason until somebody acquires it.

An empty list is a success; with --exit-code, ls exits with 1 then.`,
		Example: `  pgxlock ls --state expired,abandoned               # what nobody released
  pgxlock ls --older-than 1h --sort age --limit 10   # the ten oldest
  pgxlock ls --holder pod-7 -o json | jq -r '.[].key'
  while pgxlock ls --holder pod-7 --state live --exit-code >/dev/null; do sleep 1; done`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(cmd.Flags()); err != nil {
				return err
			}
			pool, err := t.connect(cmd.Context(), reading)
			if err != nil {
				return err
			}
			defer pool.Close()
			leases, err := listLeases(cmd.Context(), pool, t.schema, f)
			if err != nil {
				return err
			}
			if f.limit > 0 && len(leases) > f.limit {
				leases = leases[:f.limit]
				cmd.PrintErrf("pgxlock: only the first %d leases are shown; --limit shows more\n", f.limit)
			}
			if output == formatJSON {
				err = printJSON(cmd.OutOrStdout(), leases)
			} else {
				err = printLeases(cmd.OutOrStdout(), colors(cmd), "", leases)
			}
			if err == nil && exitCode && len(leases) == 0 {
				err = errNone
			}
			return err
		},
	}
	t.addFlags(cmd.Flags())
	output.addFlag(cmd)
	f.addFlags(cmd)
	cmd.Flags().BoolVar(&exitCode, "exit-code", false, "exit with 1 if no lease is listed")
	return cmd
}

// lease is a row of the view lock_leases, or of lock_shares; in JSON with the names of a
// holderView.
type lease struct {
	Key              string    `json:"key"`
	Kind             lockKind  `json:"kind"`
	Mode             string    `json:"mode"`
	State            string    `json:"state"`
	Holder           string    `json:"holder"`
	Token            int64     `json:"token,omitempty"`
	AcquiredAt       time.Time `json:"acquired_at,omitzero"` // zero, as is
	ExpiresAt        time.Time `json:"expires_at,omitzero"`  // this, if it is infinity
	HeldSeconds      *float64  `json:"held_seconds"`
	RemainingSeconds *float64  `json:"remaining_seconds"`
	Metadata         string    `json:"metadata,omitempty"`
	EvictedBy        string    `json:"evicted_by,omitempty"`
	EvictionReason   string    `json:"eviction_reason,omitempty"`
}

// The states of a lease.
const (
	stateLive      = "live"
	stateExpired   = "expired"
	stateAbandoned = "abandoned"
)

// listLeases asks for the leases in the schema, or where pgxlock is found.
func listLeases(ctx context.Context, pool *pgxpool.Pool, schema string, f filter) ([]lease, error) {
	schema, err := locate(ctx, pool, schema)
	if err != nil {
		return nil, err
	}
	rows, _ := pool.Query(ctx, statement("leases", schema), f.args()...) // CollectRows returns the error
	leases, err := pgx.CollectRows(rows, pgx.RowToStructByPos[lease])
	return leases, ofSchema(schema, err)
}

// note is why the lease was taken away from its holder, in full, or what that said of it.
func (l lease) note() string {
	if l.EvictedBy != "" {
		return evictedBy(l.EvictedBy, l.EvictionReason)
	}
	return short(printable(l.Metadata), maxMetadata)
}

// maxMetadata is how much of the metadata a table shows.
const maxMetadata = 40

func printLeases(w io.Writer, p palette, indent string, leases []lease) error {
	rows := make([][]cell, len(leases))
	for i, l := range leases {
		color := red
		switch l.State {
		case stateLive:
			color = green
		case stateExpired:
			color = yellow
		}
		rows[i] = []cell{
			{text: printable(l.Key)},
			{l.State, color},
			{text: l.Mode},
			{text: printable(l.Holder)},
			{text: fmt.Sprint(l.Token)},
			{text: since(l.HeldSeconds)},
			{text: since(l.RemainingSeconds)},
			{l.note(), faint},
		}
	}
	return printTable(w, p, indent, 0, []string{"KEY", "STATE", "MODE", "HOLDER", "TOKEN", "HELD FOR", "REMAINING", "NOTE"}, rows)
}

// since is a time that passes, or none.
func since(seconds *float64) string {
	if seconds == nil {
		return "-"
	}
	return brief(duration(*seconds))
}

func duration(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }
