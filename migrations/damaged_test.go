// Installations of which somebody dropped a part, and how Up mends them.

package migrations_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgerrcode"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/migrations"
)

// The list of what there must be is kept by hand: this says what to write there.
func TestEveryVersionHasWhatIsSaidToBeMissingWithoutIt(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for v := range upFiles {
		version := uint(v + 1)
		db := atVersion(t, version)
		db.Exec(t, "create schema empty")
		list := func(sql string, args ...any) (all []string) {
			rows, err := db.Pool.Query(t.Context(), sql, args...)
			must(t, err)
			for rows.Next() {
				var name string
				must(t, rows.Scan(&name))
				all = append(all, name)
			}
			must(t, rows.Err())
			slices.Sort(all)
			return all
		}
		there := list(`select case relkind when 'r' then 'table' when 'v' then 'view' else 'sequence' end || ' ' || relname
		                 from pg_class where relnamespace = 'public'::regnamespace and relkind in ('r', 'v', 'S')
		               union all select 'function ' || proname from pg_proc where pronamespace = 'public'::regnamespace`)
		if listed := list(place.MissingSQL, "empty", version); !slices.Equal(listed, there) {
			t.Errorf("internal/place/missing.sql, version %d: lists\n%s\nbut there is\n%s", version, strings.Join(listed, "\n"), strings.Join(there, "\n"))
		}
		if missing := list(place.MissingSQL, "public", version); len(missing) > 0 {
			t.Errorf("version %d seems to lack %s", version, missing)
		}
	}
}

func TestUpMakesAnewWhatWasDropped(t *testing.T) {
	t.Parallel()
	drop := func(sql string) func(*testing.T, *pgtest.DB) {
		return func(t *testing.T, db *pgtest.DB) { db.Exec(t, sql) }
	}
	for name, test := range map[string]struct {
		damage  func(*testing.T, *pgtest.DB)
		missing string
	}{
		"golang-migrate's drop":     {func(t *testing.T, db *pgtest.DB) { must(t, command("drop", "-f")(t, db.URL)) }, "table distributed_locks"},
		"the table of tickets":      {drop("drop table pgxlock_waiters cascade"), "table pgxlock_waiters"},
		"the table of leases":       {drop("drop table distributed_locks cascade"), "table distributed_locks"},
		"the epoch of tokens":       {drop("drop table pgxlock_epoch"), "table pgxlock_epoch"},
		"the sequence of tokens":    {drop("drop sequence pgxlock_tokens cascade"), "sequence pgxlock_tokens"},
		"both":                      {drop("drop table pgxlock_epoch; drop sequence pgxlock_tokens cascade"), "table pgxlock_epoch"},
		"a view":                    {drop("drop view lock_shares cascade"), "view lock_shares"},
		"a function":                {drop("drop function release_lock(varchar, varchar)"), "function release_lock"},
		"the version":               {drop("drop function pgxlock_version()"), "function pgxlock_version"},
		"golang-migrate's record":   {drop("drop table pgxlock_migrations"), "table pgxlock_migrations"},
		"the check of the down way": {drop("drop function pgxlock_check_unused()"), "function pgxlock_check_unused"},
	} {
		if strings.HasPrefix(name, "golang-migrate's drop") && len(waysOfGolangMigrate()) == 0 {
			continue
		}
		for _, hardened := range []bool{false, true} {
			if testing.Short() && (hardened || name != "the table of leases") {
				continue
			}
			t.Run(fmt.Sprintf("%s, hardened %t", name, hardened), func(t *testing.T) {
				t.Parallel()
				db := atVersion(t, newest)
				if hardened {
					db.Exec(t, "revoke create on schema public from public; select harden_locks()")
				}
				want := catalog(t, db)
				// As after a failover and a move: the tokens of a fresh installation are below.
				db.Exec(t, "update pgxlock_epoch set epoch_base = 3")
				const next = "select fencing_token from try_acquire_lock('k', 'a', '1 minute')"
				token := ask[int64](t, db.Pool, next)
				expect(t, db.Pool, true, "select release_lock('k', 'a')")

				test.damage(t, db)
				_, err := migrations.Version(t.Context(), db.Pool, nil)
				damage, ok := errors.AsType[*migrations.DamageError](err)
				if !ok || damage.Schema != "public" || !slices.Contains(damage.Missing, test.missing) || !strings.Contains(err.Error(), "pgxlock migrate up") {
					t.Fatalf("Version: %v", err)
				}
				if (damage.Version == newest) == (name == "the version") {
					t.Errorf("version %d", damage.Version)
				}
				for do, err := range map[string]error{"Repair": migrations.Repair(t.Context(), db.Pool, nil), "Down": down(t, db.URL)} {
					if _, ok := errors.AsType[*migrations.DamageError](err); !ok {
						t.Errorf("%s: %v", do, err)
					}
				}
				role := newRole(t, db)
				if err := up(t, as(t, db, "role", role)); name != "the version" && (err == nil || !strings.Contains(err.Error(), test.missing) && !strings.Contains(err.Error(), "more") || !strings.Contains(err.Error(), "another role")) {
					t.Errorf("Up as a role that may only lock: %v", err)
				}

				must(t, migrations.Up(t.Context(), db.Pool, nil))
				sameCatalog(t, catalog(t, db), want)
				version(t, db.Pool, newest)
				expect(t, db.Pool, marks(newest, false), versionTable)
				if again := ask[int64](t, db.Pool, next); again <= token {
					t.Errorf("token %d after %d", again, token)
				}
				expect(t, db.Pool, false, "select acquire_lock('k', 'b')")
				expect(t, db.Pool, true, "select release_lock('k', 'a')")
				callsInTransactions(t, db.Connect(t))
				must(t, migrations.Down(t.Context(), db.Pool, &migrations.Config{Force: true}))
			})
		}
	}
}

// As in a database made from a dump without rows.
func TestMissingRowsAreNamedAndRestored(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const rows = "select count(*) from (table pgxlock_epoch) e, (table pgxlock_migrations) m"
	for name, test := range map[string]struct {
		restore func(*testing.T, *pgtest.DB) error
		records bool // the version, too
	}{
		"Up":     {func(t *testing.T, db *pgtest.DB) error { return up(t, db.URL) }, true},
		"Repair": {func(t *testing.T, db *pgtest.DB) error { return migrations.Repair(t.Context(), db.Pool, nil) }, true},
		"psql":   {func(t *testing.T, db *pgtest.DB) error { return psqlFiles("up")(t, db.URL) }, true},
		"the function": {func(t *testing.T, db *pgtest.DB) error {
			_, err := db.Pool.Exec(t.Context(), "select repair_lock_tokens()")
			return err
		}, false},
	} {
		for _, hardened := range []bool{false, true} {
			if testing.Short() && (hardened || name != "Repair") {
				continue
			}
			t.Run(fmt.Sprintf("%s, hardened %t", name, hardened), func(t *testing.T) {
				t.Parallel()
				db := atVersion(t, newest)
				if hardened {
					db.Exec(t, "revoke create on schema public from public; select harden_locks()")
				}
				const next = "select fencing_token from try_acquire_lock('k', 'a', '1 minute')"
				token := ask[int64](t, db.Pool, next)
				want := catalog(t, db)
				db.Exec(t, "truncate pgxlock_epoch, pgxlock_migrations, pgxlock_since_crash, distributed_locks; alter sequence pgxlock_tokens restart")

				_, err := migrations.Version(t.Context(), db.Pool, nil)
				damage, ok := errors.AsType[*migrations.DamageError](err)
				if !ok || damage.Version != newest || !slices.Equal(damage.Missing, []string{"row of pgxlock_epoch", "row of pgxlock_migrations"}) {
					t.Fatalf("Version: %v", err)
				}
				reader := newRole(t, db) // may not know, and may not mend
				if status, err := migrations.Version(t.Context(), pgtest.Pool(t, as(t, db, "role", reader)), nil); err != nil || status.Installed != newest {
					t.Errorf("Version as a role that may not read the tables: %d, %v", status.Installed, err)
				}
				db.Exec(t, "grant select on pgxlock_epoch, pgxlock_migrations to "+reader)
				if err := up(t, as(t, db, "role", reader)); err == nil || !strings.Contains(err.Error(), "row of pgxlock_epoch") || !strings.Contains(err.Error(), "another role") {
					t.Errorf("Up as a role that may only read: %v", err)
				}
				db.Exec(t, "revoke select on pgxlock_epoch, pgxlock_migrations from "+reader)

				must(t, test.restore(t, db))
				sameCatalog(t, catalog(t, db), want)
				if test.records {
					version(t, db.Pool, newest)
					expect(t, db.Pool, marks(newest, false), versionTable)
					expect(t, db.Pool, 1, rows)
				}
				if again := ask[int64](t, db.Pool, next); again <= token {
					t.Errorf("token %d after %d", again, token)
				}
				must(t, migrations.Down(t.Context(), db.Pool, &migrations.Config{Force: true}))
			})
		}
	}
}

func TestDownRemovesWhatLacksItsRows(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest)
	db.Exec(t, "delete from pgxlock_epoch")
	must(t, migrations.Down(t.Context(), db.Pool, nil))
	version(t, db.Pool, 0)
}

// What the table holds is kept, and not adopted as a foreign one.
func TestLeasesOutliveTheLossOfWhatIsAroundThem(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest)
	token := ask[int64](t, db.Pool, "select fencing_token from try_acquire_lock('k', 'a', '10 minutes')")
	db.Exec(t, "drop table pgxlock_epoch; drop sequence pgxlock_tokens cascade")
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	expect(t, db.Pool, token, "select assert_lock_held('k', 'a')")
	expect(t, db.Pool, false, "select acquire_lock('k', 'b')")
	expect(t, db.Pool, true, "select fencing_token > $1 from try_acquire_lock('another', 'a', '1 minute')", token)
	refuse(t, migrations.Down(t.Context(), db.Pool, nil), pgerrcode.ObjectInUse)
}

// A tool runs the last file first, and stops where one fails: what is in use must be known
// to the first one.
func TestRefusedDownLeavesEverythingThatLocksNeed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			must(t, way.up(t, db.URL))
			want := catalog(t, db)
			for what, use := range map[string][2]string{
				"live leases":           {"select acquire_lock('k', 'a', 600)", "select release_lock('k', 'a')"},
				"live shares of leases": {"select acquire_shared_lock('k', 'a', 600)", "select release_shared_lock('k', 'a')"},
				"claims":                {"select claim_once('k')", "with gone as (delete from pgxlock_claims returning 1) select true from gone"},
				"runs":                  {"select start_run('k', '1 hour') is not null", "select forget_run('k', (select slot from pgxlock_runs)) is not null"},
			} {
				expect(t, db.Pool, true, use[0])
				err := way.down(t, db.URL)
				if err == nil || !strings.Contains(err.Error(), "pgxlock: "+what+" in schema public: 1") {
					t.Errorf("down: %v", err)
				}
				sameCatalog(t, catalog(t, db), want)
				version(t, db.Pool, newest)
				expect(t, db.Pool, true, "select acquire_lock('another', 'a') and release_lock('another', 'a')")
				for name, clears := range map[string]func() error{
					"Up":     func() error { return migrations.Up(t.Context(), db.Pool, nil) },
					"Repair": func() error { return migrations.Repair(t.Context(), db.Pool, nil) },
				} {
					if strings.HasPrefix(way.name, "golang-migrate") && !way.runsEveryFile() { // as it leaves it
						db.Exec(t, "update pgxlock_migrations set version = $1, dirty = true", newest-1)
					}
					must(t, clears())
					if marked := ask[string](t, db.Pool, versionTable); marked != marks(newest, false) {
						t.Errorf("%s leaves the mark %q", name, marked)
					}
				}
				if way.runsEveryFile() && strings.HasPrefix(way.name, "golang-migrate") {
					db.Exec(t, "update schema_migrations set version = $1, dirty = false", newest) // which is not ours to clear
				}
				expect(t, db.Pool, true, use[1])
			}
			must(t, way.down(t, db.URL))
			version(t, db.Pool, 0)
		})
	}
}
