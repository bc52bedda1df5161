package main

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/migrations"
)

func newMigrate() *cobra.Command {
	return group("migrate", "Install, upgrade or remove pgxlock's tables and functions", `Install, upgrade or remove pgxlock's tables and functions.

They go into --schema; without it, into the schema where the search_path finds
acquire_lock; else into the first schema of the search_path. Several programs may
migrate at the same time: this one, golang-migrate, psql. A pooler in any mode is fine.`,
		newMigrateUp(), newMigrateDown(), newMigrateStatus(), newMigrateSQL(), newMigrateRepair())
}

func newMigrateUp() *cobra.Command {
	var t target
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Install pgxlock, or upgrade to the newest version",
		Long: `Install pgxlock, or upgrade to the newest version that this program has. Where that
version or a later one is installed, up only recreates what somebody dropped of it.

up adopts a table distributed_locks with functions acquire_lock and release_lock of
the widespread form, with its rows. It exits with 75 if somebody kept a table locked:
run it again then.`,
		Example: `  pgxlock migrate up
  pgxlock migrate up --schema locks`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return t.migrate(cmd, writing, func(pool *pgxpool.Pool, cfg *migrations.Config) error {
				before, newest, err := migrations.Version(cmd.Context(), pool, cfg)
				current := err == nil && before == newest // if it cannot be told, Up says why
				if err := migrations.Up(cmd.Context(), pool, cfg); err != nil {
					return err
				}
				installed, newest, err := migrations.Version(cmd.Context(), pool, cfg)
				switch {
				case err != nil:
					return err
				case installed > newest:
					cmd.PrintErrf("pgxlock: nothing to do: version %d is installed, this program has %d\n", installed, newest)
				case current:
					cmd.PrintErrf("pgxlock: already current, version %d\n", installed)
				default:
					cmd.PrintErrf("pgxlock: installed, version %d\n", installed)
				}
				return nil
			})
		},
	}
	t.addFlags(cmd)
	return cmd
}

func newMigrateDown() *cobra.Command {
	var t target
	var force bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Remove pgxlock, with all leases",
		Long: `Remove pgxlock, with all leases. What up had adopted is restored as it was. While there
are live leases or shares, advisory locks with tokens, claims or recorded runs, down
exits with 75 and removes nothing, unless --force is given.`,
		Example: `  pgxlock migrate down
  pgxlock migrate down --force`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return t.migrate(cmd, writing, func(pool *pgxpool.Pool, cfg *migrations.Config) error {
				cfg.Force = force
				installed, _, err := migrations.Version(cmd.Context(), pool, cfg)
				if _, damaged := errors.AsType[*migrations.DamageError](err); err != nil && !damaged {
					return err
				}
				if err := migrations.Down(cmd.Context(), pool, cfg); err != nil {
					return err
				}
				if installed == 0 {
					cmd.PrintErrln("pgxlock: nothing to remove")
				} else {
					cmd.PrintErrln("pgxlock: removed")
				}
				return nil
			})
		},
	}
	t.addFlags(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "remove what is in use too: live leases and advisory locks under their holders, claims, runs")
	return cmd
}

func newMigrateRepair() *cobra.Command {
	var t target
	cmd := &cobra.Command{
		Use:   "repair",
		Short: "Repair fencing tokens after a pg_upgrade or a restore",
		Long: `Repair fencing tokens after a pg_upgrade, or a restore into another cluster or from a
dump without rows. Until then every acquire fails, so that no token is issued twice.
repair also restores the recorded version, and clears the dirty mark that
golang-migrate leaves when a file failed. "up" does all of this.`,
		Example: `  pgxlock migrate repair`,
		Args:    noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return t.migrate(cmd, writing, func(pool *pgxpool.Pool, cfg *migrations.Config) error {
				if err := migrations.Repair(cmd.Context(), pool, cfg); err != nil {
					return err
				}
				cmd.PrintErrln("pgxlock: repaired, or nothing to repair")
				return nil
			})
		},
	}
	t.addFlags(cmd)
	return cmd
}

// schemaStatus is what migrate status prints.
type schemaStatus struct {
	Installed uint     `json:"installed"` // 0: none
	Newest    uint     `json:"newest"`    // that this program knows
	State     string   `json:"state"`
	Missing   []string `json:"missing,omitempty"` // what the installed version lacks
}

func newSchemaStatus(installed, newest uint, missing []string) schemaStatus {
	s := schemaStatus{Installed: installed, Newest: newest, Missing: missing}
	switch {
	case len(missing) > 0:
		s.State = "damaged"
	case installed == 0:
		s.State = "not installed"
	case installed < newest:
		s.State = "outdated"
	case installed == newest:
		s.State = stateCurrent
	default:
		s.State = "newer than this program"
	}
	return s
}

const stateCurrent = "current"

func newMigrateStatus() *cobra.Command {
	var t target
	var output format
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the installed and the newest version",
		Long: `Show the installed version and the newest one that this program has. status exits with
0 if they are the same and nothing of it is missing, otherwise with 1.`,
		Example: `  pgxlock migrate status || pgxlock migrate up
  pgxlock migrate status -o json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return t.migrate(cmd, reading, func(pool *pgxpool.Pool, cfg *migrations.Config) error {
				installed, newest, err := migrations.Version(cmd.Context(), pool, cfg)
				damage, damaged := errors.AsType[*migrations.DamageError](err)
				if err != nil && !damaged {
					return err
				}
				var missing []string
				if damaged {
					missing = damage.Missing
				}
				status := newSchemaStatus(installed, newest, missing)
				if err := printStatus(cmd, output, status); err != nil {
					return err
				}
				if damaged {
					cmd.PrintErrln("pgxlock: " + describe(cmd.Flags(), damage))
				}
				if status.State != stateCurrent {
					return errNotCurrent
				}
				return nil
			})
		},
	}
	t.addFlags(cmd)
	output.addFlag(cmd)
	return cmd
}

func printStatus(cmd *cobra.Command, output format, s schemaStatus) error {
	if output == formatJSON {
		return printJSON(cmd.OutOrStdout(), s)
	}
	color := yellow
	if s.State == stateCurrent {
		color = green
	}
	return table{titles: []string{"INSTALLED", "NEWEST", "STATE"}}.print(cmd.OutOrStdout(), colors(cmd), sheet{},
		[][]cell{{{text: fmt.Sprint(s.Installed)}, {text: fmt.Sprint(s.Newest)}, {s.State, color}}})
}

// migrate calls fn with what the functions of package migrations take.
func (t *target) migrate(cmd *cobra.Command, u use, fn func(*pgxpool.Pool, *migrations.Config) error) error {
	pool, err := t.connect(cmd.Context(), u)
	if err != nil {
		return err
	}
	defer pool.Close()
	return fn(pool, &migrations.Config{Schema: t.schema})
}
