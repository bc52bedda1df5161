package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/monitor"
)

// The command reap removes expired leases that no holder released.

func newReap() *cobra.Command {
	var m monitoring
	var output format
	var olderThan time.Duration
	cmd := &cobra.Command{
		Use:   "reap",
		Short: "Remove leases that expired long ago",
		Long: `Remove leases, permits and shares that expired more than --older-than ago, and print how
many. This is housekeeping: no acquire depends on it, and Lockers do it from time to
time.`,
		Example: `  pgxlock reap
  pgxlock reap --older-than 24h -o json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if olderThan < 0 {
				return usageError{fmt.Errorf("--older-than is %s, it must be 0 or more", readable.Exact(olderThan))}
			}
			return m.do(cmd.Context(), writing, func(locks *monitor.Monitor) error {
				removed, err := locks.Reap(cmd.Context(), olderThan)
				switch {
				case err != nil:
					return err
				case output == formatJSON:
					return printJSON(cmd.OutOrStdout(), map[string]int64{"removed": removed})
				case removed == 0:
					_, err = fmt.Fprintln(cmd.OutOrStdout(), "nothing to remove")
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "removed %s\n", counted(removed, "lease"))
				return err
			})
		},
	}
	m.target.addFlags(cmd)
	output.addFlag(cmd)
	durationVar(cmd.Flags(), &olderThan, "older-than", "", time.Hour, "only leases that expired more than this `duration` ago")
	return cmd
}
