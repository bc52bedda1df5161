// Attacks by a role that has what is often granted, GRANT ALL ON ALL TABLES among it, to have its own
// code run with the rights of another role: of the owner of pgxlock, or of the role that migrates.

package sqltest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// attacker is a role that owns the schema of its name. There it has functions that note if another
// role runs them: run() for triggers, and note() for expressions.
type attacker struct {
	*session
	d    *database
	pool *pgxpool.Pool // of the role that owns the database
	role string
}

// attack gives an attacker a database of its own.
func attack(t *testing.T, install func(*testing.T) *database) (*database, attacker) {
	t.Helper()
	d := install(t)
	a := attacker{d: d, pool: pgtest.Pool(t, d.url), role: d.role()}
	d.do("create schema " + a.role + " authorization " + a.role + "; grant all on schema " + a.role + " to public; grant create, temporary on database " +
		d.get("quote_ident(current_database())") + " to " + a.role)
	a.session = d.as(a.role)
	note := "if current_user <> '" + a.role + "' then perform nextval('" + a.role + ".ran'); end if; "
	a.do("set search_path = public, " + a.role + "; create sequence " + a.role + ".ran; grant all on sequence " + a.role + ".ran to public; " +
		"create function " + a.role + ".run() returns trigger language plpgsql as $$ begin " + note + "return new; end $$; " +
		"create function " + a.role + ".note(text) returns boolean language plpgsql immutable as $$ begin " + note + "return true; end $$; " +
		"grant execute on all functions in schema " + a.role + " to public")
	return d, a
}

// up, down and repair run the migrations as the role that owns the database.
func (a attacker) up() error { return migrations.Up(a.d.t.Context(), a.pool, nil) }

func (a attacker) down() error {
	return migrations.Down(a.d.t.Context(), a.pool, &migrations.Config{Force: true})
}
func (a attacker) repair() error { return migrations.Repair(a.d.t.Context(), a.pool, nil) }

// ranNothing checks that no other role ran code of the attacker's.
func (a attacker) ranNothing(what string) {
	a.d.t.Helper()
	if a.d.get("select is_called from "+a.role+".ran") != "false" {
		a.d.t.Errorf("%s: code of %s ran with the rights of another role", what, a.role)
		a.d.do("alter sequence " + a.role + ".ran restart")
	}
}

// trigger makes a trigger that runs before a table is written.
func (a attacker) trigger(table, events string) {
	a.d.t.Helper()
	a.do("create trigger own before " + events + " on " + table + " execute function " + a.role + ".run()")
}

// refused checks that what s runs is refused with 55000, or what else is said, by name.
func (a attacker) refused(what string, err error, names ...string) {
	a.d.t.Helper()
	if outcome("", err) != "55000" {
		a.d.t.Errorf("%s: %v, want 55000", what, err)
		return
	}
	for _, name := range names {
		if !strings.Contains(err.Error(), name) {
			a.d.t.Errorf("%s: %v does not name %q", what, err, name)
		}
	}
	a.ranNothing(what)
}

// grantAll is what deployments do.
const grantAll = "grant all on all tables in schema public to %[1]s; grant all on all sequences in schema public to %[1]s; grant all on all functions in schema public to %[1]s"

// The only function that always has its owner's rights draws tokens, and after a crash or a failover
// it writes two tables.
func TestTokensRunNoTriggerWithTheOwnersRights(t *testing.T) {
	t.Parallel()
	d, a := attack(t, installAsIs)
	d.do(fmt.Sprintf(grantAll, a.role))
	victim := d.connect()
	for _, table := range []string{"pgxlock_since_crash", "pgxlock_epoch"} {
		a.trigger(table, "insert or update or delete")
		for what, rare := range map[string]string{
			"a crash":    "delete from pgxlock_since_crash",
			"a failover": "update pgxlock_epoch set timeline = timeline - 1",
		} {
			a.do(rare)
			for who, s := range map[string]*session{"the attacker": a.session, "another": victim} {
				a.refused(table+" after "+what+", "+who, s.run("select acquire_lock('k', 'me')"), "trigger own on table "+table, "function "+a.role+".run() of "+a.role)
			}
		}
		d.do("drop trigger own on " + table)
		d.want("acquire_lock('"+table+"', 'me')", "true")
		d.want("select count(*) from pgxlock_since_crash", "1")
	}
	// A trigger of the attacker's transaction, which has not committed yet.
	a.do("delete from pgxlock_since_crash")
	a.do("begin")
	a.trigger("pgxlock_since_crash", "insert")
	a.refused("in one transaction", a.run("select acquire_lock('one', 'me')"))
	a.rollback()
	// Another session's, which has not committed yet.
	a.do("delete from pgxlock_since_crash")
	a.do("begin")
	a.trigger("pgxlock_since_crash", "insert")
	waiter := d.connect().start("acquire_lock('waits', 'me')")
	waiter.waitsFor(a.session)
	a.commit()
	waiter.want("55000")
	a.ranNothing("in the making")
	d.do("drop trigger own on pgxlock_since_crash")
	// A snapshot that is older than the trigger hides it.
	for _, level := range levels[1:] {
		a.do("delete from pgxlock_since_crash")
		s := d.begin(level)
		a.trigger("pgxlock_since_crash", "insert")
		s.want("acquire_lock('"+level+"', 'me')", "true")
		s.commit()
		d.want("select count(*) from pgxlock_since_crash", "0")
		d.do("drop trigger own on pgxlock_since_crash")
		a.ranNothing(level)
	}
}

// Where a trusted role's function was attached by the attacker, nobody can tell.
func TestTokensRunNoTrustedTriggerThatOthersMayHaveMade(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d, a := attack(t, installAsIs)
	d.do("grant all on pgxlock_since_crash to " + a.role + "; create function audit() returns trigger language plpgsql as 'begin execute tg_argv[0]; return new; end'")
	a.do("create trigger own before insert on pgxlock_since_crash execute function public.audit('select " + a.role + ".note(null)'); delete from pgxlock_since_crash")
	a.refused("a trusted function", d.run("select acquire_lock('k', 'me')"), "trigger own", "may have been made by "+a.role)
	d.do("revoke trigger on pgxlock_since_crash from " + a.role + "; drop trigger own on pgxlock_since_crash")
	d.do("create trigger ours before insert on pgxlock_since_crash execute function public.audit('select 1')")
	d.want("acquire_lock('k', 'me')", "true") // the owner's own trigger is the owner's own affair
}

func TestRepairRunsNoTriggerWithTheOwnersRights(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d, a := attack(t, installAsIs)
	d.do("grant all on pgxlock_epoch, distributed_locks to " + a.role)
	for _, events := range []string{"truncate", "insert"} {
		a.trigger("pgxlock_epoch", events)
		a.do("update pgxlock_epoch set system_identifier = 7")
		a.refused(events, d.run("select repair_lock_tokens()"), "trigger own on table pgxlock_epoch")
		a.refused(events+" by Up", a.up(), "trigger own on table pgxlock_epoch")
		d.do("drop trigger own on pgxlock_epoch")
	}
	for _, level := range levels[1:] {
		s := d.begin(level)
		s.want("repair_lock_tokens()", "25001")
		s.rollback()
	}
	d.want("repair_lock_tokens()", "true")
}

// What the tables say is never a statement.
func TestMigrationsExecuteNoTextOfATable(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d, a := attack(t, installSeed)
	if err := a.up(); err != nil {
		t.Fatal(err)
	}
	d.do("grant select, insert, update, delete on all tables in schema public to " + a.role)
	statement := "select " + a.role + ".note(null)"
	d.do("select acquire_lock('k', 'me')")
	a.do(`do $$ declare c record; begin
		for c in select attrelid::regclass as relation, attname, typname from pg_attribute join pg_class r on r.oid = attrelid join pg_type t on t.oid = atttypid
			where relnamespace = 'public'::regnamespace and relkind = 'r' and attnum > 0 and typname in ('_text', 'text', 'varchar', 'jsonb') loop
			begin
				execute format('update %s set %I = %L', c.relation, c.attname, case c.typname when '_text' then array['` + statement + `']::text when 'jsonb' then '"` + statement + `"' else '` + statement + `' end);
			exception when others then null; end;
		end loop; end $$`)
	if err := a.down(); err != nil {
		t.Fatal(err)
	}
	a.ranNothing("Down")
	d.want("acquire_lock('k2', 'me') and release_lock('k2', 'me')", "true") // the older functions
	d.want("to_regclass('pgxlock_epoch') is null and to_regclass('pgxlock_adopted') is null", "true")
}

// A role that may create objects in the schema says what the older functions and the index were like.
func TestDownRestoresNothingOfAnotherRole(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d, a := attack(t, installSeed)
	d.do("drop function release_lock(varchar, varchar)")
	d.do("grant usage, create on schema public to " + a.role)
	const evil = "create function public.pgxlock_adopted_release_lock(varchar, varchar) returns boolean language plpgsql security definer as $$ begin return true; end $$"
	a.do(evil)
	if err := a.up(); outcome("", err) != "42501" || !strings.Contains(err.Error(), "pgxlock_adopted_release_lock(character varying,character varying) (owned by "+a.role+")") {
		t.Errorf("Up: %v", err)
	}
	a.do("drop function public.pgxlock_adopted_release_lock(varchar, varchar)")
	if err := a.up(); err != nil {
		t.Fatal(err)
	}
	a.do(evil)
	if err := a.down(); outcome("", err) != "42501" || !strings.Contains(err.Error(), "pgxlock_adopted_release_lock") {
		t.Errorf("Down: %v", err)
	}
	a.do("drop function public.pgxlock_adopted_release_lock(varchar, varchar)")
	if err := a.down(); err != nil {
		t.Fatal(err)
	}
	d.want("to_regprocedure('release_lock(varchar, varchar)') is null and to_regprocedure('acquire_lock(varchar, varchar, integer, jsonb)') is not null", "true")
}

// Default privileges apply while the files run, and each file is a transaction of its own.
func TestMigrationsTakeBackWhatDefaultPrivilegesGave(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d, a := attack(t, func(t *testing.T) *database { return open(t, pgtest.New(t).URL) })
	accomplice := d.role()
	owner := d.role()
	d.do("grant all on schema public to " + owner)
	up := d.as(owner)
	up.do("set search_path = public; alter default privileges in schema public grant all on tables to " + a.role + " with grant option; " +
		"alter default privileges in schema public grant all on sequences to " + a.role + "; alter default privileges in schema public grant all on functions to public")
	files := upFiles(t)
	for i, file := range files {
		up.do(file)
		// Taken back where it is given: between two files it could be used.
		d.want("select count(*) from pg_class c, aclexplode(c.relacl) x where c.relnamespace = 'public'::regnamespace and c.relkind = 'r' "+
			"and x.grantee <> c.relowner and x.privilege_type in ('TRIGGER', 'TRUNCATE', 'REFERENCES')", "0")
		if i == 0 {
			a.do("grant update on pgxlock_epoch, pgxlock_migrations to " + accomplice + " with grant option")
			d.as(accomplice).do("grant update on public.pgxlock_epoch to public")
		}
		if i == 1 {
			up.do("grant trigger on pgxlock_migrations to " + a.role)
			a.trigger("pgxlock_migrations", "delete or insert")
			a.refused("the next file", up.run(files[2]), "trigger own on table pgxlock_migrations", a.role+".run()")
			up.do("drop trigger own on pgxlock_migrations")
		}
	}
	d.want(`select string_agg(distinct x.privilege_type, ' ') from pg_class c, aclexplode(c.relacl) x where c.relnamespace = 'public'::regnamespace and c.relkind = 'r'
		and x.grantee <> c.relowner and (x.privilege_type not in ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
			or x.privilege_type <> 'SELECT' and c.relname in ('pgxlock_epoch', 'pgxlock_since_crash', 'pgxlock_migrations'))`, "NULL")
	a.want("has_sequence_privilege('pgxlock_tokens', 'update')", "false")
	a.want("setval('pgxlock_tokens', 1)", "42501")
	a.want("acquire_lock('k', 'me')", "true")
	for _, table := range []string{"pgxlock_since_crash", "pgxlock_epoch", "pgxlock_migrations", "distributed_locks"} {
		for _, s := range []*session{a.session, d.as(accomplice)} {
			if err := s.run("create trigger own before insert on public." + table + " execute function " + a.role + ".run()"); outcome("", err) != "42501" {
				t.Errorf("%s: %v", table, err)
			}
		}
	}
}

// The role that migrates writes the version table before the files look at it, and golang-migrate makes it.
func TestMigratorsRunNoTriggerOfTheVersionTable(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d, a := attack(t, installAsIs)
	d.do("grant all on pgxlock_migrations to " + a.role)
	a.trigger("pgxlock_migrations", "insert or update or delete or truncate")
	d.do("begin; alter table pgxlock_migrations disable trigger own; update pgxlock_migrations set dirty = true; alter table pgxlock_migrations enable trigger own; commit; create function old_file() returns void language sql as ''")
	for name, err := range map[string]error{
		"Repair": a.repair(),
		"Down":   a.down(),
		"a file": d.run(upFiles(t)[7]),
		"grant":  d.run("select grant_locks('" + a.role + "', 'application')"),
		"harden": d.run("select harden_locks()"),
	} {
		state := "55000"
		if name == "Repair" || name == "Down" {
			state = "42P17"
		}
		if outcome("", err) != state || !strings.Contains(fmt.Sprint(err), "trigger own on table ") {
			t.Errorf("%s: %v", name, err)
		}
		a.ranNothing(name)
	}
	d.want("select count(*) from pgxlock_migrations where dirty", "1")
	d.do("drop trigger own on pgxlock_migrations")
	if err := a.repair(); err != nil {
		t.Error(err)
	}
}

// What a foreign key deletes is deleted with the rights of the other table's owner, whose triggers can
// change search_path for the rest of the statement.
func TestMigratorsRunNoCodeThroughAForeignKey(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d, a := attack(t, installAsIs)
	d.do("grant all on pgxlock_migrations to " + a.role)
	a.do(fmt.Sprintf(`create table %[1]s.child (version bigint constraint lure references public.pgxlock_migrations on delete cascade);
		create table %[1]s.pgxlock_migrations (version bigint, dirty boolean); grant all on %[1]s.pgxlock_migrations to public;
		create trigger own before insert on %[1]s.pgxlock_migrations for each row execute function %[1]s.run();
		create function %[1]s.lure() returns trigger language plpgsql as $$ begin perform set_config('search_path', '%[1]s', true); return old; end $$;
		create trigger lure before delete on %[1]s.child for each row execute function %[1]s.lure(); insert into %[1]s.child select version from public.pgxlock_migrations`, a.role))
	a.refused("a file", d.run(upFiles(t)[7]), "constraint lure on table "+a.role+".child of "+a.role)
	d.do("update pgxlock_migrations set dirty = true")
	if err := a.repair(); outcome("", err) != "42P17" || !strings.Contains(err.Error(), "constraint lure on table ") {
		t.Errorf("Repair: %v", err)
	}
	a.ranNothing("Repair")
	a.do("drop table " + a.role + ".child")
	if err := a.repair(); err != nil {
		t.Error(err)
	}
}

// A role that owns what the table uses, or may use the table, has no code of its own run by the role that adopts it.
func TestAdoptionRefusesForeignCodeByName(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d, a := attack(t, installSeed)
	d.do("insert into distributed_locks select 'k' || i, 'h', now(), now() + '1 hour' from generate_series(1, 3) i; grant all on distributed_locks to " + a.role)
	run, note := a.role+".run()", a.role+".note"
	a.do("create domain " + a.role + ".word as text check (" + note + "(value)); create domain " + a.role + ".given as text check (" + note + "(value)); " +
		"create function " + a.role + ".same(text, text) returns boolean language plpgsql immutable as $$ begin return " + note + "($1); end $$; " +
		"create operator " + a.role + ".=== (leftarg = text, rightarg = text, function = " + a.role + ".same)")
	d.do("alter domain " + a.role + ".given owner to " + d.get("current_user") + "; create function trusted() returns trigger language plpgsql as 'begin return new; end'")
	for what, c := range map[string]struct{ make, drop, names string }{
		"a trigger":            {"create trigger own before update on distributed_locks for each row execute function " + run, "drop trigger own on distributed_locks", "trigger own on table distributed_locks uses function " + run + " of " + a.role},
		"a disabled trigger":   {"create trigger own before update on distributed_locks for each row execute function " + run + "; alter table distributed_locks disable trigger own", "drop trigger own on distributed_locks", "trigger own"},
		"a trigger's WHEN":     {"create trigger own before update on distributed_locks for each row when (" + note + "('')) execute function trusted()", "drop trigger own on distributed_locks", "trigger own on table distributed_locks uses function " + note},
		"anybody's trigger":    {"create trigger own before update on distributed_locks for each row execute function trusted()", "drop trigger own on distributed_locks", "trigger own on table distributed_locks may have been made by " + a.role},
		"a rule":               {"create rule own as on update to distributed_locks do also select " + note + "('')", "drop rule own on distributed_locks", "rule own on table distributed_locks uses function " + note},
		"a policy":             {"create policy own on distributed_locks using (" + note + "(lock_name)); alter table distributed_locks enable row level security, force row level security", "drop policy own on distributed_locks; alter table distributed_locks disable row level security, no force row level security", "policy own on table distributed_locks"},
		"a check":              {"alter table distributed_locks add constraint own check (" + note + "(lock_name))", "alter table distributed_locks drop constraint own", "constraint own on table distributed_locks"},
		"a default":            {"alter table distributed_locks alter metadata set default to_jsonb(" + note + "(''))", "alter table distributed_locks alter metadata set default '{}'", "default value for column metadata of table distributed_locks"},
		"an index":             {"create index own on distributed_locks (" + note + "(lock_name))", "drop index own", "index own uses function " + note},
		"a partial index":      {"create index own on distributed_locks (lock_name) where " + note + "(holder_id)", "drop index own", "index own uses function " + note},
		"statistics":           {"create statistics own on (" + note + "(lock_name)), holder_id from distributed_locks", "drop statistics own", "statistics object own uses function " + note},
		"a domain":             {"alter table distributed_locks add constraint own check ((lock_name::" + a.role + ".word) is not null)", "alter table distributed_locks drop constraint own", "type " + a.role + ".word of " + a.role},
		"a check of a domain":  {"alter table distributed_locks add constraint own check ((lock_name::" + a.role + ".given) is not null)", "alter table distributed_locks drop constraint own", "uses function " + note},
		"an operator":          {"alter table distributed_locks add constraint own check (lock_name operator(" + a.role + ".===) '')", "alter table distributed_locks drop constraint own", "operator " + a.role + ".==="},
		"a child":              {"create table " + a.role + ".child () inherits (public.distributed_locks)", "drop table " + a.role + ".child", "inherits from table distributed_locks"},
		"a parent":             {"create table " + a.role + ".parent (lock_name varchar(255) not null); alter table distributed_locks inherit " + a.role + ".parent", "alter table distributed_locks no inherit " + a.role + ".parent; drop table " + a.role + ".parent", "distributed_locks inherits from"},
		"a view in a rule":     {"create view " + a.role + ".v as select 1 as one; alter view " + a.role + ".v owner to " + a.role + "; create rule own as on update to distributed_locks do also select one from " + a.role + ".v", "drop rule own on distributed_locks; drop view " + a.role + ".v", "view " + a.role + ".v of " + a.role},
		"a trusted's function": {"create function trusted_check(text) returns boolean language sql immutable begin atomic select " + note + "($1); end; alter table distributed_locks add constraint own check (trusted_check(lock_name))", "alter table distributed_locks drop constraint own; drop function trusted_check", "uses function " + note},
	} {
		d.do(c.make)
		d.do("alter sequence " + a.role + ".ran restart") // what d itself did to make it
		before := d.get("select count(*) from pg_class")
		a.refused(what, a.up(), c.names)
		a.refused(what+", a file", d.run(upFiles(t)[0]), c.names)
		d.want("select count(*) from pg_class where relname <> 'pgxlock_migrations' and relname <> 'pgxlock_migrations_pkey'", before)
		d.do(c.drop)
	}
	// The owner's own code is adopted, and looked at again on the way down.
	d.do("create function ours(text) returns boolean language sql immutable return true; alter table distributed_locks add constraint ours check (ours(lock_name)); revoke trigger on distributed_locks from " +
		a.role + "; create trigger ours before insert on distributed_locks for each row execute function trusted(); create rule ours as on delete to distributed_locks where false do also nothing")
	if err := a.up(); err != nil {
		t.Fatal(err)
	}
	d.do("alter function ours(text) owner to " + a.role)
	a.refused("down", a.down(), "constraint ours on table distributed_locks uses function ours(text) of "+a.role)
	d.do("drop function ours(text) cascade")
	if err := a.down(); err != nil {
		t.Fatal(err)
	}
	a.ranNothing("the whole")
}

// An operator for exactly the types of a call counts before one of pg_catalog for any array, and so does a function
// without an argument that has a default, wherever they stand in the search_path.
func TestFunctionsRunNoOperatorOrOverloadOfAnotherRole(t *testing.T) {
	t.Parallel()
	d, a := attack(t, installAsIs)
	d.do("grant create on schema public to " + a.role)
	a.do("create function " + a.role + ".noted(text[], text[]) returns boolean language plpgsql as $$ begin perform " + a.role + ".note(''); return false; end $$; " +
		"grant execute on all functions in schema " + a.role + " to public; " +
		"create operator public.= (leftarg = text[], rightarg = text[], function = " + a.role + ".noted); " +
		"create operator public.<> (leftarg = text[], rightarg = text[], function = " + a.role + ".noted)")
	d.do("revoke create on schema public from " + a.role)
	for range 2 { // also a ticket that is there
		d.do(`select pgxlock_publish_batch('{0}', '{k}', '{1}', '{1}', '{"[\"holder\"]"}', null, 'owner', 60000, 1)`)
	}
	a.ranNothing("publishing a ticket")
	a.refused("hardening", d.run("select harden_locks()"), "operator =(text[],text[])", "operator <>(text[],text[])")
	a.do("drop operator public.= (text[], text[]); drop operator public.<> (text[], text[])")

	d.do("grant create on schema public to " + a.role)
	a.do("create function public.pgxlock_durable() returns void language plpgsql as $$ begin perform " + a.role + ".note(''); end $$")
	d.do("revoke create on schema public from " + a.role)
	d.want("acquire_lock('k', 'me')", "true")
	a.ranNothing("acquiring a lock")
	a.refused("hardening", d.run("select harden_locks()"), "pgxlock_durable()")
	a.do("drop function public.pgxlock_durable()")
	d.do("select harden_locks()")
	a.ranNothing("hardening")
}

// GRANT ALL after hardening gives TRIGGER on what the functions write with the owner's rights. Nothing in
// the database can keep an owner from that: to harden again takes back each kind of grant, or says what is in the way.
func TestHardeningAgainTakesBackEachKindOfGrant(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d, a := attack(t, installAsIs)
	accomplice := d.role()
	d.do("select harden_locks(), grant_locks('" + a.role + "', 'application')")
	// Of all that is in the schema, and not only of what pgxlock_grants() knows.
	const rights = `select string_agg(concat_ws(' ', (x.acl).privilege_type, x.object, (x.acl).grantee, (x.acl).grantor, (x.acl).is_grantable), ', ' order by x.object, x.acl)
		from (select oid::regclass::text as object, relowner as owner, aclexplode(relacl) as acl from pg_class where relnamespace = 'public'::regnamespace
		      union all select attrelid::regclass || '.' || attname, relowner, aclexplode(attacl) from pg_attribute join pg_class c on c.oid = attrelid where relnamespace = 'public'::regnamespace
		      union all select oid::regprocedure::text, proowner, aclexplode(coalesce(proacl, acldefault('f', proowner))) from pg_proc where pronamespace = 'public'::regnamespace) x
		where (x.acl).grantee <> x.owner`
	want := d.get(rights)
	const acquire = "function acquire_lock(varchar, varchar, integer, jsonb)"
	for _, grant := range []string{
		"grant all on all tables in schema public to " + a.role,
		"grant all on all tables in schema public to " + a.role + " with grant option; set role " + a.role + "; grant trigger, update on distributed_locks, pgxlock_claims to " + accomplice +
			"; grant update (holder_id), references (lock_name) on distributed_locks to " + accomplice + "; reset role",
		"grant all on all sequences in schema public to " + a.role,
		"grant all on all sequences in schema public to public",
		"grant all on all tables in schema public to public; grant execute on all routines in schema public to " + accomplice,
		"grant select (lock_name, xmin), insert (lock_name) on distributed_locks to " + accomplice,
		"grant select (holder_id) on lock_holders to public; grant references (kind) on pgxlock_evictions to " + a.role,
		"grant execute on " + acquire + " to public; grant execute on function pgxlock_next_tokens(bigint), soften_locks() to " + a.role,
		"grant execute on " + acquire + " to " + a.role + " with grant option; set role " + a.role + "; grant execute on " + acquire + " to " + accomplice + "; reset role",
		"grant execute on all functions in schema public to public",
	} {
		d.do(grant)
		if d.get(rights) == want {
			t.Error("granted nothing: " + grant)
		}
		if strings.Contains(grant, "routines") {
			a.refused("all functions", d.run("select harden_locks()"), accomplice)
			d.do("select revoke_locks('" + accomplice + "')")
		}
		d.do("select harden_locks()")
		d.want(rights, want)
	}

	// What it refuses, and what it leaves: the schema may be for more than pgxlock.
	d.do("grant usage, create on schema public to " + accomplice)
	a.refused("create on the schema", d.run("select harden_locks()"), accomplice)
	d.do("revoke create on schema public from " + accomplice + "; alter view lock_holders owner to " + accomplice)
	a.refused("a view of another role", d.run("select harden_locks()"), "lock_holders (owned by "+accomplice+")")
	d.do("alter view lock_holders owner to " + d.get("current_user") + "; select harden_locks()")
	d.want("select count(*) from pg_namespace, aclexplode(nspacl) x where nspname = 'public' and x.grantee = '"+accomplice+"'::regrole and x.privilege_type = 'USAGE'", "1")

	// A migration that hardens again makes these anew under default privileges.
	for _, objects := range []string{"tables", "sequences", "functions"} {
		d.do("alter default privileges in schema public grant all on " + objects + " to public, " + a.role)
	}
	d.do("drop table pgxlock_runs, pgxlock_waiters cascade; drop sequence pgxlock_tickets cascade; drop function harden_locks(), claim_once(text, interval, interval)")
	if err := a.up(); err != nil {
		t.Fatal(err)
	}
	d.want(rights, want)
	d.want("select count(*) from pg_default_acl where defaclnamespace = 'public'::regnamespace", "3")

	d.do("grant trigger on distributed_locks to " + a.role)
	a.trigger("distributed_locks", "insert")
	for name, call := range map[string]string{"harden": "harden_locks()", "grant": "grant_locks('" + accomplice + "', 'monitoring')"} {
		a.refused(name, d.run("select "+call), "trigger own on table distributed_locks")
	}
	a.refused("a file", d.run(upFiles(t)[7]), "trigger own on table distributed_locks")
	d.do("drop trigger own on distributed_locks; select harden_locks()")
	d.want(rights, want)
}

// A foreign key's check runs as the owner of the table that it refers to, and casts what it looks for, where the other
// table has it as a type with a cast of its owner's. So REFERENCES gives the owner's rights, on every table of every
// PostgreSQL database, and no trigger sees it. Without the right, or once it and the foreign key are gone, nothing runs.
func TestReferencesGivesTheOwnersRightsUntilItIsTakenBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d, a := attack(t, installAsIs)
	a.do(fmt.Sprintf("create domain %[1]s.word as text; create function %[1]s.spell(%[1]s.word[]) returns text language plpgsql immutable as $$ begin perform %[1]s.note($1[1]); return ''; end $$; "+
		"create cast (%[1]s.word[] as text) with function %[1]s.spell(%[1]s.word[]) as implicit", a.role))
	child := "create table " + a.role + ".child (k " + a.role + ".word[] constraint own references public.distributed_locks)"
	for _, mode := range []struct{ name, enter, back string }{
		{"as installed", "select 1", "revoke references on distributed_locks from " + a.role},
		{"hardened", "select harden_locks()", "select harden_locks()"},
	} {
		d.do(mode.enter + "; select grant_locks('" + a.role + "', 'application')")
		for _, right := range []string{"references", "references (lock_name)"} {
			if err := a.run(child); outcome("", err) != "42501" {
				t.Fatalf("%s, before %s: %v", mode.name, right, err)
			}
			d.do("grant " + right + " on distributed_locks to " + a.role)
			a.do(child)
			if err := a.run("insert into " + a.role + ".child values ('{k}')"); outcome("", err) != "23503" {
				t.Errorf("%s, %s: %v", mode.name, right, err)
			}
			if d.get("select is_called from "+a.role+".ran") != "true" {
				t.Errorf("%s, %s: the cast did not run as the owner: docs/rights.md says that it does", mode.name, right)
			}
			d.do("alter sequence " + a.role + ".ran restart")
			a.refused(mode.name+", "+right, d.run("select harden_locks()"), "constraint own on table "+a.role+".child of "+a.role)
			d.do("drop table " + a.role + ".child; " + mode.back)
		}
		if err := a.run(child); outcome("", err) != "42501" {
			t.Errorf("%s, at the end: %v", mode.name, err)
		}
	}
}
