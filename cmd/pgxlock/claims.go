package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
)

func newClaims() *cobra.Command {
	return group("claims", "Remove old claims", `Claims say which work was done once: ClaimTx and claim_once() make them. Only a purge
removes them.`, newClaimsPurge())
}

func newClaimsPurge() *cobra.Command {
	var t target
	var output format
	var olderThan time.Duration
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "purge --older-than DURATION",
		Short: "Remove old claims",
		Long: `Remove the claims without a retention that were made more than --older-than ago, and
those whose retention is over, and print how many. Their keys can then be claimed again,
and the work be done again: choose a time that is longer than the latest repetition of a
request. Claims that another purge removes meanwhile are left to it.`,
		Example: `  pgxlock claims purge --older-than 720h --dry-run   # how many that would be
  pgxlock claims purge --older-than 720h`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case !cmd.Flags().Changed("older-than"):
				return usageError{fmt.Errorf("--older-than is missing; say how old claims must be, for example --older-than 720h: the keys of younger ones stay claimed")}
			case olderThan <= 0:
				return usageError{fmt.Errorf("--older-than is %s, it must be more than 0: work that was just done could be done again", readable.Exact(olderThan))}
			}
			return t.inDatabase(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
				var n int64
				var err error
				field, said := "removed", "removed"
				if dryRun {
					field, said = "would_remove", "would remove"
					err = pool.QueryRow(ctx, statement("purgeable_claims", schema), olderThan.Seconds()).Scan(&n)
				} else {
					n, err = pgxlock.PurgeClaims(ctx, pool, olderThan, pgxlock.Schema(schema))
				}
				switch {
				case err != nil && n > 0:
					return fmt.Errorf("%d claims were removed, then: %w", n, err)
				case err != nil:
					return err
				case output == formatJSON:
					return printJSON(cmd.OutOrStdout(), map[string]int64{field: n})
				case n == 0:
					_, err = fmt.Fprintln(cmd.OutOrStdout(), "nothing to remove")
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s %s\n", said, counted(n, "claim"))
				return err
			})
		},
	}
	t.addFlags(cmd)
	output.addFlag(cmd)
	durationVar(cmd.Flags(), &olderThan, "older-than", "", 0, "only claims without a retention that were made more than this `duration` ago (required)")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "remove nothing, and print how many claims would be removed")
	return cmd
}
