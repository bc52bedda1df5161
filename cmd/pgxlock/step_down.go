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

step-down names the holder that it has asked, exits with 0, and does not wait until that
has followed: pgxlock watch shows it. A leader that listens is notified at once, one
behind a pooler within seconds. The server does not know which holders lead: one that
does not, such as pgxlock run, ignores the request; evict it. If nobody holds the lock,
step-down exits with 1.`,
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
				var asked []string
				for _, name := range names {
					var holders []string
					if err := write(ctx, pool, statements.LeaderAskToStepDown.In(schema), []any{name.Kind(), name.Text(), by, reason}, &holders); err != nil {
						return err
					}
					for _, holder := range holders {
						if name.Kind() != 0 { // the holder id of a lease may be any text
							holder = ofSession(holder)
						}
						asked = append(asked, holder)
					}
				}
				if len(asked) == 0 {
					return outcome{exitNoLeader, fmt.Errorf("nobody holds %s exclusively, as a leader does; pgxlock watch shows who holds what", shown(args[0]))}
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "asked the holder of %s to step down: %s (only a leader does, pgxlock run does not)\n",
					shown(args[0]), some(asked, 10, printable))
				return err
			})
		},
	}
	t.addFlags(cmd)
	cmd.Flags().StringVar(&reason, "reason", "", "`why`, for the leader's log")
	kind.addFlag(cmd, "lease or advisory: ask only a leader with such a lock (default: whichever is held)")
	return cmd
}

// named returns the locks that a key names, as evict takes it: #42 and @billing/k are names, and also
// the advisory lock that they show.
func named(text string, kind lockKind) ([]lockkey.Name, error) {
	var names []lockkey.Name
	if kind != kindAdvisory {
		names = append(names, lockkey.Name{Key: text})
	}
	if kind != kindLease {
		names = append(names, lockkey.Name{ID: lockkey.Identify(text)})
		if key := typed(text); key != text {
			names = append(names, lockkey.Name{ID: lockkey.Identify(key)})
		}
	}
	return names, lockkey.Check(text)
}
