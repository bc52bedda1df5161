package main

import (
	"context"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// The command step-down asks a leader to hand over.

func newStepDown() *cobra.Command {
	var t target
	var reason string
	var kind lockKind
	cmd := &cobra.Command{
		Use:   "step-down KEY",
		Short: "Ask a leader to step down",
		Long: `Ask the leader for a key, in any process, to step down: a program in Go that uses
Locker.Lead, or pgxlock lead, which ends its command. When that has ended, the
candidate that has waited longest leads.

step-down exits with 0 when the request is delivered, and does not wait until the leader
has followed it. A leader that listens is notified at once, one behind a pooler within
seconds. A holder that is no leader, such as pgxlock run, ignores the request: evict it.
If nobody holds the lock, step-down exits with 1.`,
		Example: `  pgxlock step-down scheduler
  pgxlock step-down scheduler --reason 'deploy of 2.4'`,
		Args: oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			names, err := named(args[0], kind)
			if err != nil {
				return usageError{err}
			}
			host, _ := os.Hostname()
			by := fmt.Sprintf("%.150s:%d", host, os.Getppid())
			return t.inDatabase(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
				asked := false
				for _, name := range names {
					var n int64
					if err := write(ctx, pool, statements.LeaderAskToStepDown.In(schema), []any{name.Kind(), name.Text(), by, reason}, &n); err != nil {
						return err
					}
					asked = asked || n > 0
				}
				if !asked {
					return outcome{exitNoLeader, fmt.Errorf("nobody leads for %s; pgxlock watch shows who holds what", shown(args[0]))}
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "asked the holder of %s to step down\n", shown(args[0]))
				return err
			})
		},
	}
	t.addFlags(cmd)
	cmd.Flags().StringVar(&reason, "reason", "", "`why`, for the leader's log")
	kind.addFlag(cmd, "lease or advisory: ask only a leader with such a lock (default: whichever is held)")
	return cmd
}

// named returns the locks that a key names: with #42 the advisory lock of that number, unless
// kind says that it is a name.
func named(text string, kind lockKind) ([]lockkey.Name, error) {
	key := text
	if kind != kindLease {
		key = typed(text)
	}
	var names []lockkey.Name
	if _, raw := lockkey.ParseRaw(key); kind != kindAdvisory && !raw {
		names = append(names, lockkey.Name{Key: key})
	}
	if kind != kindLease {
		names = append(names, lockkey.Name{ID: lockkey.Identify(key)})
	}
	return names, lockkey.CheckAdvisory(key)
}
