package systemtest_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
	statements "github.com/pgxlock/pgxlock/sql"
)

// What Doctor finds at what the migrations made.

func TestDoctorTellsWhichVersionIsThereAndWhatItLacks(t *testing.T) {
	t.Parallel()
	newest := newest(t)
	versions := []int{0, newest, newest - 1, newest + 1}
	if testing.Short() {
		versions = versions[:2]
	}
	for _, version := range versions {
		t.Run(fmt.Sprint("version ", version), func(t *testing.T) {
			t.Parallel()
			var db *pgtest.DB
			switch version {
			case 0:
				db = pgtest.New(t)
			case newest:
				db = testkit.Migrated(t)
			default:
				db = onVersion(t, version)
			}
			findings := examine(t, db, nil)
			switch {
			case version == 0:
				wantFinding(t, findings, "schema", statusError, "has no pgxlock", db.Name, "pgxlock migrate up")
				if _, there := findings["tokens"]; there || len(findings) != len(doctorChecks)-10 {
					t.Errorf("%v", findings)
				}
			case version < newest:
				wantFinding(t, findings, "rights", statusWarning, "no pgxlock_rights()", "pgxlock migrate up")
				wantFinding(t, findings, "escalation", statusWarning, "no pgxlock_rights()", "pgxlock migrate up")
				wantFinding(t, findings, "schema", statusError, fmt.Sprint("version ", version), fmt.Sprint("this program needs version ", newest), "migrations.Up", "pgxlock migrate up")
			case version == newest:
				wantFinding(t, findings, "schema", statusOK, `schema "public"`, fmt.Sprint("version ", version))
			default:
				wantFinding(t, findings, "schema", statusWarning, fmt.Sprint("version ", version), fmt.Sprint("this program knows version ", newest))
			}
			if version == newest-1 { // what each role needs is listed by the last one
				delete(findings, "rights")
				delete(findings, "escalation")
			}
			wantRestOK(t, findings, "schema", "durability", "lock_table")
		})
	}
}

func TestDoctorTellsWhichOfSeveralInstallationsIsUsed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	seed, err := os.ReadFile("../../testdata/seed.sql")
	if err != nil {
		t.Fatal(err)
	}
	db := pgtest.New(t)
	install(t, db, "one")
	wantFinding(t, examine(t, db, nil), "schema", statusOK, `schema "one"`)
	install(t, db, "two")
	wantFinding(t, examine(t, db, nil), "schema", statusError, `schema "one", "two"`, "none of them is on the search_path", "doctor.Config.Schema")
	wantFinding(t, examine(t, withPath(t, db, "public, two"), nil), "schema", statusWarning, `schema "two" has version`, "2 of them (one, two)", "know nothing of those in another")
	wantFinding(t, examine(t, db, &doctor.Config{Schema: "one"}), "schema", statusWarning, `schema "one" has version`)
	wantFinding(t, examine(t, db, &doctor.Config{Schema: "three"}), "schema", statusError, `schema "three" has no pgxlock`)
	db.Exec(t, string(seed))
	wantFinding(t, examine(t, db, nil), "schema", statusError, `schema "public" are older`)
}

func TestTablesAreHeapsWhateverTheDefaultIsAndTheDoctorFindsWhatWasAltered(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	const seed = "../../testdata/seed.sql"
	db.Exec(t, "create access method columnar type table handler heap_tableam_handler")
	t.Cleanup(func() { _, _ = db.Pool.Exec(context.Background(), "drop access method columnar cascade") })
	columnar := db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_table_access_method"] = "columnar" })
	if err := migrations.Up(t.Context(), columnar, nil); err != nil {
		t.Fatal(err)
	}
	const others = "select coalesce(string_agg(oid::regclass::text, ' ' order by relname), '') from pg_class where relkind = 'r' and relam = (select oid from pg_am where amname = 'columnar')"
	if found := testkit.Query[string](t, db, others); found != "" {
		t.Errorf("tables with the default access method: %s", found)
	}
	wantFinding(t, examine(t, db, nil), "schema", statusOK)
	db.Exec(t, "alter table pgxlock_runs set access method columnar; alter table distributed_locks set access method columnar")
	wantFinding(t, examine(t, db, nil), "schema", statusError, "distributed_locks (columnar), pgxlock_runs (columnar)", "SET ACCESS METHOD heap")
	db.Exec(t, "alter table pgxlock_runs set access method heap; alter table distributed_locks set access method heap")
	wantFinding(t, examine(t, db, nil), "schema", statusOK)

	for _, altered := range []struct {
		statement string
		status    doctor.Status
		words     []string
		undo      string
	}{
		{"alter table pgxlock_claims set unlogged", statusError, []string{"pgxlock_claims (unlogged)", "SET LOGGED"}, "alter table pgxlock_claims set logged"},
		{"alter table pgxlock_since_crash set logged", statusError, []string{"pgxlock_since_crash (logged)"}, "alter table pgxlock_since_crash set unlogged"},
		{`create function stamp() returns trigger language plpgsql as $$ begin new.updated_at := now(); return new; end $$;
		  create trigger stamp before update on distributed_locks for each row execute function stamp()`, statusWarning, []string{"triggers", "renewals: distributed_locks"}, "drop function stamp cascade"},
		{"create rule off as on delete to pgxlock_runs do instead nothing", statusWarning, []string{"rules", "renewals: pgxlock_runs"}, "drop rule off on pgxlock_runs"},
	} {
		db.Exec(t, altered.statement)
		wantFinding(t, examine(t, db, nil), "schema", altered.status, altered.words...)
		db.Exec(t, altered.undo)
	}
	wantFinding(t, examine(t, db, nil), "schema", statusOK)

	// A migration makes heaps beside an adopted table. The adopted table keeps its access method.
	if err := migrations.Down(t.Context(), columnar, nil); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(seed)
	if err != nil {
		t.Fatal(err)
	}
	db.Exec(t, string(text))
	if err := migrations.Up(t.Context(), columnar, nil); err != nil {
		t.Fatal(err)
	}
	if found := testkit.Query[string](t, db, others); found != "" {
		t.Errorf("tables beside an adopted one with the default access method: %s", found)
	}
}

func TestDoctorFindsTheMarkOfAMigrationThatFailed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, "update pgxlock_migrations set dirty = true")
	wantFinding(t, examine(t, db, nil), "schema", statusWarning, "dirty", "pgxlock migrate repair")
	if err := migrations.Repair(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	wantFinding(t, examine(t, db, nil), "schema", statusOK)
	db.Exec(t, "truncate pgxlock_migrations")
	wantFinding(t, examine(t, db, nil), "schema", statusWarning, "pgxlock_migrations has no row", "pgxlock migrate repair")
	if err := migrations.Repair(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	wantFinding(t, examine(t, db, nil), "schema", statusOK)
}

func TestDoctorFindsFunctionsThatLookElsewhere(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, schema := range []string{"locks", `Upper "double' Näme`, "a.b, c"} {
		db := pgtest.New(t)
		install(t, db, schema)
		quoted := pgx.Identifier{schema}.Sanitize()
		wantFinding(t, examine(t, db, nil), "search_path", statusOK, fmt.Sprintf("%q", schema))

		db.Exec(t, "alter function "+quoted+".try_acquire_lock(varchar, varchar, interval, jsonb) set search_path = public, pg_temp")
		wantFinding(t, examine(t, db, nil), "search_path", statusError, "1 function without", "try_acquire_lock(")

		// None of them is left out.
		var n int
		if err := db.Pool.QueryRow(t.Context(), "select count(*) from pg_proc where pronamespace = $1::text::regnamespace and prosqlbody is null", quoted).Scan(&n); err != nil || n < 50 {
			t.Fatal(n, err)
		}
		db.Exec(t, `do $$ declare f regprocedure; begin
			for f in select oid from pg_proc where prosqlbody is null and pronamespace in (select oid from pg_namespace where nspname not like 'pg\_%' and nspname <> 'information_schema')
			loop execute 'alter function ' || f || ' reset search_path'; end loop; end $$`)
		wantFinding(t, examine(t, db, nil), "search_path", statusError, fmt.Sprint(n, " functions"), "install.md#renaming-the-schema")
	}

	db := pgtest.New(t)
	install(t, db, "locks")
	db.Exec(t, "alter schema locks rename to renamed")
	wantFinding(t, examine(t, db, nil), "search_path", statusError, "renamed, pg_temp")
	mine := testkit.Migrated(t)
	mine.Exec(t, "create function mine() returns int language sql as 'select 1'")
	wantFinding(t, examine(t, mine, nil), "search_path", statusOK)
}

func TestDoctorFindsTokensThatCouldRepeat(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, "select acquire_lock('k', 'A')")
	wantFinding(t, examine(t, db, nil), "tokens", statusOK)
	for name, test := range map[string]struct{ damage, says string }{
		"rows without the sequence": {"update distributed_locks set fencing_token = fencing_token + (1000000::bigint << 40)", "restored without the sequence"},
		"another cluster":           {"update pgxlock_epoch set system_identifier = 1", "LK003"},
		"an earlier timeline":       {"update pgxlock_epoch set timeline = timeline + 1", "LK003"},
		"a dump without rows":       {"truncate pgxlock_epoch", "pgxlock_epoch has no row"},
	} {
		db.Exec(t, test.damage)
		wantFinding(t, examine(t, db, nil), "tokens", statusError, test.says, "pgxlock migrate repair")
		if err := migrations.Repair(t.Context(), db.Pool, nil); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		wantFinding(t, examine(t, db, nil), "tokens", statusOK)
	}
	db.Exec(t, "select setval('pgxlock_tokens', (1::bigint << 39) - 1)")
	wantFinding(t, examine(t, db, nil), "tokens", statusOK)
	db.Exec(t, "select setval('pgxlock_tokens', 1::bigint << 39)")
	wantFinding(t, examine(t, db, nil), "tokens", statusWarning, "549755813888 of the 1099511627776 numbers", "SELECT repair_lock_tokens()")
	db.Exec(t, "select repair_lock_tokens()")
	wantFinding(t, examine(t, db, nil), "tokens", statusOK)

	timeline := testkit.Query[string](t, db, "select pg_get_functiondef('pgxlock_timeline()'::regprocedure)")
	db.Exec(t, "create or replace function pgxlock_timeline() returns bigint language sql volatile return 1::bigint")
	wantFinding(t, examine(t, db, nil), "tokens", statusWarning, "does not tell its timeline", "after a failover")
	db.Exec(t, timeline)
	db.Exec(t, "create or replace function pgxlock_system_identifier() returns bigint language sql stable return 0::bigint; update pgxlock_epoch set system_identifier = 0")
	wantFinding(t, examine(t, db, nil), "tokens", statusWarning, "system identifier")
}

func TestDoctorFindsRowLevelSecurityWhereItStopsARole(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	role, app := login(t, db)
	db.Exec(t, "select grant_locks('"+role+"', 'application')")
	wantFinding(t, examine(t, app, nil), "row_security", statusOK, "not enabled")
	db.Exec(t, "alter table distributed_locks enable row level security")
	wantFinding(t, examine(t, app, nil), "row_security", statusError, "distributed_locks", role, "DISABLE ROW LEVEL SECURITY")
	wantFinding(t, examine(t, db, nil), "row_security", statusOK, "enabled on distributed_locks")
	db.Exec(t, "select harden_locks(), grant_locks('"+role+"', 'application')") // then they run as the owner
	wantFinding(t, examine(t, app, nil), "row_security", statusOK, "enabled on distributed_locks")
	useLock(t, testkit.NewLocker(t, app, nil), app.Pool, "k")

	// FORCEd it applies to an owner, too, who is no superuser.
	theirs, owner := login(t, db)
	db.Exec(t, "create schema forced authorization "+theirs)
	install(t, owner, "forced")
	forced := &doctor.Config{Schema: "forced"}
	owner.Exec(t, "select forced.harden_locks(), forced.grant_locks('"+role+"', 'application'); alter table forced.pgxlock_claims enable row level security")
	wantFinding(t, examine(t, app, forced), "row_security", statusOK, "enabled on pgxlock_claims")
	owner.Exec(t, "alter table forced.pgxlock_claims force row level security")
	wantFinding(t, examine(t, app, forced), "row_security", statusError, "pgxlock_claims")
}

func TestDoctorFindsCollationsThatHaveChanged(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	wantFinding(t, examine(t, db, nil), "collation", statusOK)
	if testkit.Query[int](t, db, "select current_setting('server_version_num')::int") >= 150000 {
		change := "update pg_database set datcollversion = $1 where datname = current_database()"
		old := testkit.Query[*string](t, db, "select datcollversion from pg_database where datname = current_database()")
		db.Exec(t, change, "0.0")
		wantFinding(t, examine(t, db, nil), "collation", statusWarning, `version 0.0`, "your own unique indexes", "REFRESH COLLATION VERSION")
		db.Exec(t, "create index on distributed_locks (holder_id)")
		wantFinding(t, examine(t, db, nil), "collation", statusError, "distributed_locks_holder_id_idx", "REINDEX")
		db.Exec(t, change, old)
		wantFinding(t, examine(t, db, nil), "collation", statusOK)
	}
	db.Exec(t, `create collation odd (provider = icu, locale = 'und'); alter table pgxlock_claims alter claim_key type text collate odd`)
	wantFinding(t, examine(t, db, nil), "collation", statusOK)
	db.Exec(t, "update pg_collation set collversion = '0.0' where collname = 'odd'")
	wantFinding(t, examine(t, db, nil), "collation", statusError, "pgxlock_claims_pkey", "collation odd: version 0.0, now ", "two get one lock")
}

func TestDoctorFindsLeasesThatNobodyRemoves(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	leave := func(n int, since string) {
		t.Helper()
		db.Exec(t, "insert into distributed_locks (lock_name, holder_id, expires_at) select $1 || i, 'A', now() - $1::interval from generate_series(1, $2) i", since, n)
	}
	leave(1000, "3 hours")
	leave(1000, "1 hour")
	wantFinding(t, examine(t, db, nil), "expired", statusOK, "1000 leases")
	leave(1, "4 hours")
	wantFinding(t, examine(t, db, nil), "expired", statusWarning, "1001 leases", "reap_expired_locks")
	db.Exec(t, "select reap_expired_locks('1 hour', 10000)")
	wantFinding(t, examine(t, db, nil), "expired", statusOK, "0 leases")
}

func TestDoctorFindsManyClaims(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	wantFinding(t, examine(t, db, nil), "claims", statusOK, "about 0 claims")
	grow := func(table string, pages int) {
		t.Helper()
		db.Exec(t, fmt.Sprintf("set allow_system_table_mods = on; update pg_class set reltuples = 7000000, relpages = %d where oid = %s; reset allow_system_table_mods", pages, table))
	}
	grow("'pgxlock_claims'::regclass", 1<<17-1)
	wantFinding(t, examine(t, db, nil), "claims", statusOK, "about 7000000 claims")
	grow("'pgxlock_claims'::regclass", 1<<17)
	wantFinding(t, examine(t, db, nil), "claims", statusWarning, "1 GB", "PurgeClaims")
	grow("'pgxlock_claims'::regclass", 1)
	grow("(select reltoastrelid from pg_class where oid = 'pgxlock_claims'::regclass)", 1<<18-1) // of the answers
	wantFinding(t, examine(t, db, nil), "claims", statusWarning, "about 7000000 claims", "2 GB")
}

func TestDoctorFindsRunsThatAreNotStartedAgain(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	record := func(row string) {
		t.Helper()
		db.Exec(t, `insert into pgxlock_runs (run_key, slot, state, attempt, holder, lease, started_at, keep_until, period)
			select k, now() + s::interval, t, 1, 'x', l, now(), 'infinity', p::interval from (values `+row+`) v (k, s, t, l, p)`)
	}
	db.Exec(t, "select acquire_lock('live', 'x')")
	record(`('good', '-1 hour', 'succeeded', null, '1 day'), ('running', '-1 hour', 'running', null, '1 day'), ('again', '-1 hour', 'failed', 'gone', '1 day'),
		('abandoned', '-1 hour', 'running', 'gone', '1 day'), ('long', '-2 days', 'running', 'live', '1 day'), ('recovered', '-2 days', 'failed', null, '1 day'),
		('recovered', '-1 day', 'succeeded', null, '1 day'), ('at it', '-2 days', 'failed', null, '1 day'), ('at it', '-1 hour', 'running', null, '1 day'),
		('skipped', '-1 day', 'skipped', null, '1 day'), ('tick', '-1 hour', 'running', null, null)`)
	wantFinding(t, examine(t, db, nil), "runs", statusOK)
	for row, says := range map[string]string{
		"('failed', '-1 hour', 'failed', null, '1 day'), ('failed', '-1 day', 'succeeded', null, '1 day')":    `"failed" of `,
		"('died', '-25 hours', 'running', null, '1 day'), ('died', '-1 hour', 'withdrawn', null, '1 day')":    "not ended, its process may have died",
		"('retried', '-25 hours', 'failed', 'gone', '1 day'), ('retried', '-1 hour', 'skipped', null, '1 d')": `"retried" of `,
		"('crashed', '-25 hours', 'running', 'gone', '1 day')":                                                `"crashed" of `,
		"('theirs', '-25 hours', 'running', 'live2', '1 day')":                                                `"theirs" of `,
		"('tick 2', '-25 hours', 'running', null, null)":                                                      `"tick 2" of `,
	} {
		db.Exec(t, "select acquire_lock('live2', 'y'); delete from pgxlock_runs where run_key not in ('good', 'running', 'again', 'abandoned', 'long', 'recovered', 'at it', 'skipped', 'tick')")
		record(row)
		wantFinding(t, examine(t, db, nil), "runs", statusWarning, says, "pgxlock runs forget KEY")
	}
}

func TestRoleWithHardlyAnyRightsIsToldWhatItCouldNotSee(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	install(t, db, "locks")
	role, theirs := login(t, db)
	owner := db.Pool.Config().ConnConfig.User
	wantSkipped := func(findings map[string]doctor.Finding, check, advice string) {
		t.Helper()
		wantFinding(t, findings, check, doctor.StatusSkipped, role, "may not check it", "42501", `run it as role "`+owner+`"`, advice)
	}
	findings := examine(t, theirs, nil)
	if len(findings) != len(doctorChecks) {
		t.Errorf("%d findings", len(findings))
	}
	wantFinding(t, findings, "schema", statusWarning, "could not be checked", "42501", "grant_locks")
	wantFinding(t, findings, "rights", statusError, role, "may not lock", "SELECT locks.grant_locks('"+role+"', 'application')")
	if strings.Contains(findings["rights"].Advice, "GRANT USAGE") { // which grant_locks grants
		t.Error(findings["rights"])
	}
	wantSkipped(findings, "tokens", "")
	wantSkipped(findings, "expired", `SELECT locks.grant_locks('`+role+"', 'monitoring')")
	wantSkipped(findings, "runs", `SELECT locks.grant_locks('`+role+"', 'monitoring')")
	wantFinding(t, findings, "snapshots", doctor.StatusSkipped, "may not see the sessions of other roles, which may have held back vacuum for 1h0m0s", role, `GRANT pg_read_all_stats TO "`+role+`"`)
	wantRestOK(t, findings, "schema", "rights", "tokens", "expired", "runs", "snapshots", "durability", "lock_table")

	db.Exec(t, "select locks.harden_locks(), locks.grant_locks('"+role+"', 'application')")
	findings = examine(t, theirs, nil)
	wantFinding(t, findings, "schema", statusOK)
	wantFinding(t, findings, "rights", statusOK, role, "all rights of application")
	wantSkipped(findings, "tokens", "")
	wantSkipped(findings, "expired", "'monitoring'")
	db.Exec(t, "select locks.grant_locks('"+role+"', 'monitoring'); grant pg_read_all_stats to "+role)
	findings = examine(t, theirs, nil)
	wantFinding(t, findings, "expired", statusOK)
	wantFinding(t, findings, "snapshots", statusOK)
	if strings.Contains(fmt.Sprint(findings["lock_table"]), "could not") {
		t.Error(findings["lock_table"])
	}
}

func TestDoctorFindsHowOtherRolesCouldRunCodeAsTheOwner(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	owner, theirs := ownedBy(t, db, "locks")
	other, _ := login(t, db)
	accomplice, _ := login(t, db)
	in := &doctor.Config{Schema: "locks"}
	wantFinding(t, examine(t, theirs, in), "escalation", statusOK, `schema "locks"`)
	wantFinding(t, examine(t, db, nil), "escalation", statusWarning, "pgxlock belongs to the superuser", "a role that may do nothing else")
	db.Exec(t, "grant usage on schema locks to public; create schema "+other+" authorization "+other+
		"; create function "+other+".run() returns trigger language plpgsql as 'begin return new; end'; alter function "+other+".run() owner to "+other+
		"; create function locks.ours() returns trigger language plpgsql as 'begin return new; end'; alter function locks.ours() owner to "+owner)
	const all = "grant all on all tables in schema locks to "
	for _, hardened := range []bool{false, true} {
		if hardened {
			db.Exec(t, "select locks.harden_locks(), locks.grant_locks('"+other+"', 'application')")
			wantFinding(t, examine(t, theirs, in), "escalation", statusOK)
		}
		for _, c := range []struct {
			make  string
			mends bool // its advice is statements
			says  []string
		}{
			{all + other, true, []string{"role " + other + " has DELETE, INSERT,", "TRIGGER", "pgxlock_epoch|13 more"}},
			{all + "public", true, []string{"PUBLIC has DELETE, INSERT,", "TRIGGER"}},
			{all + other + " with grant option; set role " + other + "; grant trigger on locks.pgxlock_epoch to " + accomplice + "; reset role", true, []string{"role " + accomplice + " has TRIGGER on pgxlock_epoch"}},
			{"grant references on locks.distributed_locks, locks.pgxlock_claims, locks.lock_leases to " + other, true, []string{"role " + other + " has REFERENCES on distributed_locks, "}},
			{"grant references (lock_name) on locks.distributed_locks to " + other, true, []string{"role " + other + " has REFERENCES on distributed_locks"}},
			{"grant update (epoch_base) on locks.pgxlock_epoch to " + other, true, []string{"role " + other + " has UPDATE on pgxlock_epoch"}},
			{"grant all on all sequences in schema locks to " + other, true, []string{"role " + other + " has UPDATE on pgxlock_tokens|role " + other + " has UPDATE, USAGE on"}},
			{"create trigger own before insert on locks.distributed_locks execute function " + other + ".run()", false, []string{"trigger own on table locks.distributed_locks runs function " + other + ".run() of " + other, "as role " + owner}},
			{"grant trigger on locks.pgxlock_epoch to " + other + "; create trigger own before insert on locks.pgxlock_epoch execute function locks.ours()", false, []string{"trigger own on table locks.pgxlock_epoch may be of a role that may create triggers there"}},
			{"grant references on locks.pgxlock_claims to " + other + "; set role " + other + "; create table " + other + ".child (k varchar(255) constraint own references locks.pgxlock_claims on delete cascade); reset role", false, []string{"constraint own on table " + other + ".child of " + other + " refers to table locks.pgxlock_claims, and so runs code of that role with the rights of " + owner}},
			{"create rule own as on insert to locks.distributed_locks do also select " + other + ".note()", false, []string{"rule own on table locks.distributed_locks"}},
			{"grant create on schema locks to " + other, false, []string{other + " may create objects in schema locks", "REVOKE CREATE ON SCHEMA locks"}},
			{"grant create on schema locks to public", false, []string{"PUBLIC may create objects in schema locks"}},
			{"create function locks.acquire_lock(text, text) returns boolean language sql return true; alter function locks.acquire_lock(text, text) owner to " + other, false, []string{"not trusted", other, "acquire_lock"}},
			{"alter table locks.pgxlock_claims owner to " + other, false, []string{"not trusted", other, "pgxlock_claims"}},
		} {
			db.Exec(t, "create or replace function "+other+".note() returns boolean language sql return true; alter function "+other+".note() owner to "+other+"; "+c.make)
			findings := examine(t, theirs, in)
			name := "escalation"
			if c.says[0] == "not trusted" {
				name = "schema" // then nothing of it is called
			}
			wantFinding(t, findings, name, statusError)
			for _, says := range c.says {
				if !slices.ContainsFunc(strings.Split(says, "|"), func(one string) bool {
					return strings.Contains(findings[name].Detail+findings[name].Advice, one)
				}) {
					t.Errorf("hardened %t, %s: %+v does not say %q", hardened, c.make, findings[name], says)
				}
			}
			if c.mends {
				wantMended(t, findings["escalation"].Advice, owner, theirs)
			} else {
				db.Exec(t, "drop trigger if exists own on locks.distributed_locks; drop trigger if exists own on locks.pgxlock_epoch; drop rule if exists own on locks.distributed_locks; revoke trigger on locks.pgxlock_epoch from "+other+"; drop table if exists "+other+".child; revoke references on locks.pgxlock_claims from "+other+
					"; revoke create on schema locks from public, "+other+"; drop function if exists locks.acquire_lock(text, text); alter table locks.pgxlock_claims owner to "+owner)
			}
			if f := examine(t, theirs, in)["escalation"]; f.Status != statusOK {
				t.Fatalf("hardened %t, after %s: %+v", hardened, c.make, f)
			}
		}
	}
}

// ownedBy makes a role and an installation of its own, in a schema of which it can grant rights.
func ownedBy(t *testing.T, db *pgtest.DB, schema string) (owner string, theirs *pgtest.DB) {
	t.Helper()
	owner, theirs = login(t, db)
	db.Exec(t, "create schema "+pgx.Identifier{schema}.Sanitize()+" authorization "+owner)
	install(t, theirs, schema)
	return owner, theirs
}

// wantMended runs the statements that the doctor advises, as the role that each is for.
func wantMended(t *testing.T, advice, owner string, theirs *pgtest.DB) {
	t.Helper()
	for statement := range strings.SplitSeq(advice, "; ") {
		sql, asked := strings.CutPrefix(statement, "as role "+owner+": ")
		if !asked {
			t.Errorf("not for role %s: %q", owner, statement)
		}
		theirs.Exec(t, sql)
	}
}

// lacked returns the rights of a kind of role that the doctor finds the pool's role to lack, and
// its advice.
func lacked(t *testing.T, db *pgtest.DB, schema, kind string) (lacks, mend string) {
	t.Helper()
	type roleKind struct {
		Name, Lacks, Mend string
		Granted           bool
		Owner             string
	}
	rows, _ := db.Pool.Query(t.Context(), statements.DoctorRights.Text(), schema)
	kinds, err := pgx.CollectRows(rows, pgx.RowToStructByPos[roleKind])
	i := slices.IndexFunc(kinds, func(k roleKind) bool { return k.Name == kind })
	if err != nil || i < 0 {
		t.Fatal(kinds, err)
	}
	return kinds[i].Lacks, kinds[i].Mend
}

// Each right is taken away alone, in both forms. The doctor names it and no other, and what it
// advises gives it back.
func TestDoctorNamesEachRightThatARoleLacks(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for form, call := range map[string]string{"as installed": "soften_locks()", "hardened": "harden_locks()"} {
		for _, kind := range []string{"application", "monitoring", "administration"} {
			t.Run(form+" "+kind, func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				owner, theirs := ownedBy(t, db, "locks")
				role, app := login(t, db)
				theirs.Exec(t, "select locks."+call)
				theirs.Exec(t, "select locks.grant_locks($1, $2)", role, kind)
				rows, _ := theirs.Pool.Query(t.Context(), `select trim(p), split_part(object, ' ', 1), regexp_replace(object, '^[A-Z]+ ', '')
					from locks.pgxlock_rights(), unnest(string_to_array(privileges, ',')) p
					where $1 = any (kinds) and coalesce(hardened = locks.pgxlock_hardened(), true)
					union all select 'USAGE', 'SCHEMA', 'locks'`, kind)
				type right struct{ Privilege, Class, Object string }
				rights, err := pgx.CollectRows(rows, pgx.RowToStructByPos[right])
				if err != nil || len(rights) < 10 {
					t.Fatal(len(rights), err)
				}
				wantFinding(t, examine(t, app, &doctor.Config{Schema: "locks"}), "rights", statusOK, role, "all rights of "+kind)
				status := statusWarning
				if kind == "application" {
					status = statusError
				}
				for i, r := range rights {
					object := r.Object
					if r.Class != "SCHEMA" {
						object = "locks." + object
					}
					theirs.Exec(t, fmt.Sprintf("revoke %s on %s %s from %s", r.Privilege, r.Class, object, role))
					name, _, _ := strings.Cut(r.Object, "(")
					if r.Class == "SCHEMA" {
						name = "schema locks"
					}
					lacks, mend := lacked(t, app, "locks", kind)
					if want := r.Privilege + " on " + name; lacks != want {
						t.Fatalf("lacks %q, want %q", lacks, want)
					}
					if i == 0 { // all checks take ten times as long
						f := examine(t, app, &doctor.Config{Schema: "locks"})["rights"]
						if want := fmt.Sprintf("role %q lacks rights of %s: %s", role, kind, lacks); f.Status != status || f.Detail != want || f.Advice != mend {
							t.Errorf("%+v, want %q and %q", f, want, mend)
						}
					}
					wantMended(t, mend, owner, theirs)
				}
				wantFinding(t, examine(t, app, &doctor.Config{Schema: "locks"}), "rights", statusOK, "all rights of "+kind)
			})
		}
	}
}

func TestDoctorTellsWhatARoleMayDo(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, call := range []string{"soften_locks()", "harden_locks()"} {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			const schema = `Upper "double' Näme`
			quoted := pgx.Identifier{schema}.Sanitize()
			owner, theirs := ownedBy(t, db, schema)
			theirs.Exec(t, "select "+quoted+"."+call)
			const all = "has all rights of application, administration, monitoring"
			wantFinding(t, examine(t, db, &doctor.Config{Schema: schema}), "rights", statusOK, all) // a superuser
			wantFinding(t, examine(t, theirs, &doctor.Config{Schema: schema}), "rights", statusOK, owner, all)

			// A role without rights, of a name that needs quotes, by SET ROLE.
			role := `Role's "` + rand.Text()
			db.Exec(t, "create role "+pgx.Identifier{role}.Sanitize())
			t.Cleanup(func() {
				if _, err := db.Pool.Exec(context.Background(), "drop owned by "+pgx.Identifier{role}.Sanitize()+" cascade; drop role "+pgx.Identifier{role}.Sanitize()); err != nil {
					t.Error(err)
				}
			})
			app := &pgtest.DB{Pool: db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = role }), URL: db.URL, Name: db.Name}
			findings := examine(t, app, &doctor.Config{Schema: schema})
			wantFinding(t, findings, "rights", statusError, fmt.Sprintf("%q", role), "may not lock")
			wantMended(t, findings["rights"].Advice, owner, theirs)
			wantFinding(t, examine(t, app, &doctor.Config{Schema: schema}), "rights", statusOK, fmt.Sprintf("%q", role), "has all rights of application")

			// With another kind as well it is still an application, which lacks a right.
			theirs.Exec(t, "select "+quoted+".grant_locks($1, 'monitoring')", role)
			wantFinding(t, examine(t, app, &doctor.Config{Schema: schema}), "rights", statusOK, "has all rights of application, monitoring")
			lost := map[string]string{
				"soften_locks()": "insert on " + quoted + ".distributed_locks from ",
				"harden_locks()": "execute on function " + quoted + ".lock_tx from ",
			}[call]
			theirs.Exec(t, "revoke "+lost+pgx.Identifier{role}.Sanitize())
			wantFinding(t, examine(t, app, &doctor.Config{Schema: schema}), "rights", statusError, "lacks rights of application")
			theirs.Exec(t, "select "+quoted+".revoke_locks($1)", role)
			wantFinding(t, examine(t, app, &doctor.Config{Schema: schema}), "rights", statusError, "may not lock")
			theirs.Exec(t, "select "+quoted+".grant_locks($1, 'monitoring')", role)
			wantFinding(t, examine(t, app, &doctor.Config{Schema: schema}), "rights", statusOK, "has all rights of monitoring, and may not lock")
		})
	}
}

// As installed everybody may call the functions, unless somebody made the server stricter.
func TestDoctorFindsFunctionsThatNotEverybodyMayCall(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	owner, theirs := ownedBy(t, db, "locks")
	role, app := login(t, db)
	db.Exec(t, "alter role "+role+" in database "+db.Name+" set search_path = locks")
	theirs.Exec(t, "select locks.grant_locks($1, 'application')", role)
	theirs.Exec(t, "revoke execute on all functions in schema locks from public")
	findings := examine(t, app, &doctor.Config{Schema: "locks"})
	wantFinding(t, findings, "rights", statusError, "EXECUTE on acquire_in_turn, acquire_lock, ", "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA locks TO "+role)
	wantMended(t, findings["rights"].Advice, owner, theirs)
	wantFinding(t, examine(t, app, &doctor.Config{Schema: "locks"}), "rights", statusOK, "has all rights of application")
	useLock(t, testkit.NewLocker(t, app, &pgxlock.LeaseConfig{Schema: "locks"}), app.Pool, "k")
}

func TestDoctorPrintsNoControlCharactersOfNames(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	role := "evil\n\x1b[2J\u202e" + rand.Text()
	db.Exec(t, "create role "+pgx.Identifier{role}.Sanitize())
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.Background(), "drop role "+pgx.Identifier{role}.Sanitize()); err != nil {
			t.Error(err)
		}
	})
	findings := examine(t, &pgtest.DB{Pool: db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = role }), URL: db.URL, Name: db.Name}, nil)
	if text := findings["rights"].Advice; !strings.Contains(text, `evil\n\x1b[2J\u202e`) {
		t.Errorf("the advice does not name the role: %q", text)
	}
	for name, f := range findings {
		if text := f.Detail + f.Advice; strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%s: %q", name, text)
		}
	}
}
