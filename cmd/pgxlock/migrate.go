package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/migrations"
)

func newMigrate() *cobra.Command {
	return group("migrate", "Install, upgrade or remove pgxlock's tables and functions", `Install, upgrade or remove pgxlock's tables and functions.

They are in --schema; without it, in the schema that all commands use; "up" installs
into the first schema of the search_path if there is none. Several programs may migrate
at the same time: this one, golang-migrate, psql. A pooler in any mode is fine.`,
		newMigrateUp(), newMigrateDown(), newMigrateStatus(), newMigrateSQL(), newMigrateRepair())
}

func newMigrateUp() *cobra.Command {
	var t target
	var another bool
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Install pgxlock, or upgrade to the newest version",
		Long: `Install pgxlock, or upgrade to the newest version that this program has. Where that
version or a later one is installed, up only recreates what somebody dropped of it.
Beside another schema that has pgxlock, up installs only with --another.

up adopts a table distributed_locks with functions acquire_lock and release_lock of
the widespread form, with its rows. It exits with 75 if somebody kept a table locked:
run it again then.`,
		Example: `  pgxlock migrate up
  pgxlock migrate up --schema locks`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return t.migrate(cmd, writing, func(pool *pgxpool.Pool, cfg *migrations.Config) error {
				before, damage, err := versionOf(cmd, pool, cfg)
				if err != nil {
					return err
				}
				if before.Installed == 0 && damage == nil {
					if err := refuse(cmd.Context(), pool, before, another); err != nil {
						return err
					}
				}
				if err := migrations.Up(cmd.Context(), pool, cfg); err != nil {
					return err
				}
				now, err := migrations.Version(cmd.Context(), pool, cfg)
				if err != nil {
					return err
				}
				did, which := "upgraded", ""
				switch {
				case now.Installed > now.Newest:
					did, which = "nothing to do", fmt.Sprintf("; this program has version %d", now.Newest)
				case damage != nil:
					did, which = "restored", ": "+missed(damage)
				case before.Installed == 0:
					did = "installed"
				case before.Installed == now.Installed:
					did = "already current"
				}
				cmd.PrintErrf("pgxlock: %s, version %d in %s%s\n", did, now.Installed, where(now), which)
				return nil
			})
		},
	}
	t.addFlags(cmd)
	cmd.Flags().BoolVar(&another, "another", false, "install although another schema of the database has pgxlock: locks in one know nothing of those in the other")
	return cmd
}

// versionOf is [migrations.Version], but that damage is no error.
func versionOf(cmd *cobra.Command, pool *pgxpool.Pool, cfg *migrations.Config) (migrations.Status, *migrations.DamageError, error) {
	status, err := migrations.Version(cmd.Context(), pool, cfg)
	damage, damaged := errors.AsType[*migrations.DamageError](err)
	if damaged {
		err = nil
	}
	return status, damage, err
}

// missed names what was missing.
func missed(damage *migrations.DamageError) string {
	return some(slices.Sorted(slices.Values(damage.Missing)), 10, printable)
}

// where names a schema, and its database.
func where(s migrations.Status) string {
	return fmt.Sprintf("schema %q of database %q", s.Schema, s.Database)
}

// refuse refuses to install what would not be used.
func refuse(ctx context.Context, pool *pgxpool.Pool, to migrations.Status, another bool) error {
	if !another {
		if err := refuseAnother(ctx, pool, to); err != nil {
			return err
		}
	}
	var trusted bool
	var role string
	if err := pool.QueryRow(ctx, statement("owns", to.Schema), to.Schema).Scan(&trusted, &role); err != nil || trusted {
		return err
	}
	return &lockerr.RefusedError{
		Err: fmt.Errorf("nothing was installed in %s: role %q owns neither of them, so no program would trust what it installs", where(to), role),
		Lack: fmt.Sprintf("run CREATE SCHEMA locks AUTHORIZATION %s as the owner of the database, then pgxlock migrate up --schema locks; or migrate as that owner",
			pgx.Identifier{role}.Sanitize()),
	}
}

// refuseAnother refuses to install where another schema has pgxlock, even if this role trusts its owner only by name:
// two halves of a fleet could lock past each other.
func refuseAnother(ctx context.Context, pool *pgxpool.Pool, to migrations.Status) error {
	var found place.Found
	err := pool.AcquireFunc(ctx, func(c *pgxpool.Conn) (err error) {
		found, err = dbconn.Querier{Conn: c.Conn()}.Look(ctx, "")
		return err
	})
	if err != nil {
		return err
	}
	others, untrusted := found.Beside(to.Schema)
	if others == "" {
		return nil
	}
	remedy := "name that one with --schema"
	if untrusted != nil { // any role that may create a schema can make it look so
		remedy = untrusted.Error()
	}
	return &remediedError{
		usageError{fmt.Errorf("nothing was installed in %s: pgxlock is in %s already, and locks in one schema know nothing of those in another", where(to), others)},
		remedy + ", or add --another for a second",
	}
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
				before, _, err := versionOf(cmd, pool, cfg)
				if err != nil {
					return err
				}
				if err := migrations.Down(cmd.Context(), pool, cfg); err != nil {
					return err
				}
				if before.Installed == 0 {
					cmd.PrintErrf("pgxlock: nothing to remove in %s\n", where(before))
				} else {
					cmd.PrintErrf("pgxlock: removed, version %d from %s; left: the schema, and its empty table %s\n", before.Installed, where(before), migrations.Table)
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
				_, damage, err := versionOf(cmd, pool, cfg)
				if err != nil {
					return err
				}
				if err := migrations.Repair(cmd.Context(), pool, cfg); err != nil {
					return err
				}
				status, err := migrations.Version(cmd.Context(), pool, cfg)
				if err != nil {
					return err
				}
				restored := ""
				if damage != nil {
					restored = "; restored: " + missed(damage)
				}
				cmd.PrintErrf("pgxlock: tokens and the recorded version are in order, version %d in %s%s\n", status.Installed, where(status), restored)
				return nil
			})
		},
	}
	t.addFlags(cmd)
	return cmd
}

// schemaStatus is what migrate status prints.
type schemaStatus struct {
	Database  string   `json:"database"`
	Schema    string   `json:"schema"`
	Installed uint     `json:"installed"` // 0: none
	Newest    uint     `json:"newest"`    // that this program knows
	State     string   `json:"state"`
	Missing   []string `json:"missing,omitempty"` // what the installed version lacks
}

func newSchemaStatus(found migrations.Status, missing []string) schemaStatus {
	s := schemaStatus{Database: found.Database, Schema: found.Schema, Installed: found.Installed, Newest: found.Newest, Missing: missing}
	switch {
	case len(missing) > 0:
		s.State = "damaged"
	case s.Installed == 0:
		s.State = "not installed"
	case s.Installed < s.Newest:
		s.State = "outdated"
	case s.Installed == s.Newest:
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
				found, damage, err := versionOf(cmd, pool, cfg)
				if err != nil {
					return err
				}
				var missing []string
				if damage != nil {
					missing = damage.Missing
				}
				status := newSchemaStatus(found, missing)
				if err := printStatus(cmd, output, status); err != nil {
					return err
				}
				if damage != nil {
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
	return table{titles: []string{"DATABASE", "SCHEMA", "INSTALLED", "NEWEST", "STATE"}}.print(cmd.OutOrStdout(), colors(cmd), sheet{},
		[][]cell{{{text: printable(s.Database)}, {text: printable(s.Schema)}, {text: fmt.Sprint(s.Installed)}, {text: fmt.Sprint(s.Newest)}, {s.State, color}}})
}

// migrate calls fn with what the functions of package migrations take.
func (t *target) migrate(cmd *cobra.Command, u use, fn func(*pgxpool.Pool, *migrations.Config) error) error {
	pool, err := t.connect(cmd.Context(), u)
	if err != nil {
		return err
	}
	defer pool.Close()
	err = fn(pool, &migrations.Config{Schema: t.schema})
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == pgerrcode.LockNotAvailable && pgErr.Hint == "" {
		return &remediedError{err, "run it again; pgxlock doctor names the session that keeps a table locked"}
	}
	return err
}
