// Attacks on the search for pgxlock: a role plants what has its names, for others to call.

package sqltest_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/monitor"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// A planted database has a sequence that what is planted draws from: that shows that it ran, even in a
// transaction that was rolled back.
type planted struct {
	*database
	pool  *pgxpool.Pool // of a superuser, who owns the database
	traps []string      // statements that make each of pgxlock's functions and views, in the schema of a marker
}

func newPlanted(t *testing.T, db *pgtest.DB) *planted {
	t.Helper()
	db.Exec(t, `drop schema if exists locks, other cascade; drop sequence if exists public.ran;
		create sequence public.ran; grant all on sequence public.ran to public`)
	p := &planted{database: open(t, db.URL), pool: db.Pool}
	p.install("locks")
	rows, err := db.Pool.Query(t.Context(), `
		select format('create function /* schema */.%I(%s) returns %s language plpgsql volatile as $$ begin perform nextval(''public.ran''); raise ''ran''; end $$',
		              proname, pg_get_function_arguments(oid), pg_get_function_result(oid))
		  from pg_proc where pronamespace = 'locks'::regnamespace and concat(pg_get_function_arguments(oid), pg_get_function_result(oid)) not like '%locks.%'
		union all
		select format('create view /* schema */.%I as select nextval(''public.ran'') as lock_name', relname)
		  from pg_class where relnamespace = 'locks'::regnamespace and relkind in ('r', 'v')`)
	if err == nil {
		p.traps, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if err != nil || len(p.traps) < 100 {
		t.Fatalf("%d traps: %v", len(p.traps), err)
	}
	return p
}

// install installs pgxlock in a schema, as the superuser.
func (p *planted) install(schema string) {
	p.t.Helper()
	if err := migrations.Up(p.t.Context(), p.pool, &migrations.Config{Schema: schema}); err != nil {
		p.t.Fatal(err)
	}
}

// on returns a pool of the superuser with a search_path.
func (p *planted) on(path string) *pgxpool.Pool {
	p.t.Helper()
	return pgtest.Pool(p.t, p.url, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = path })
}

// plant makes in a schema what pgxlock has there, and opens it to all.
func (p *planted) plant(s *session, schema string) {
	p.t.Helper()
	for _, trap := range p.traps {
		s.do(strings.ReplaceAll(trap, "/* schema */", schema))
	}
	s.do("grant select on all tables in schema " + schema + " to public")
}

// wantNotRun fails the test if something that was planted ran.
func (p *planted) wantNotRun(what string) {
	p.t.Helper()
	if p.get("(select is_called from public.ran)") != "false" {
		p.t.Errorf("%s ran what was planted", what)
		p.do("select setval('public.ran', 1, false)")
	}
}

// look lets these look for pgxlock, all without names, and returns the error of each.
func (p *planted) look(pool *pgxpool.Pool, schema string, names ...string) map[string]error {
	p.t.Helper()
	found := make(map[string]error)
	for name, look := range lookers {
		if len(names) == 0 || slices.Contains(names, name) {
			found[name] = look(p.t.Context(), pool, schema)
			p.wantNotRun(name)
		}
	}
	return found
}

// wantFound wants these to work, all without names.
func (p *planted) wantFound(pool *pgxpool.Pool, schema string, names ...string) {
	p.t.Helper()
	for name, err := range p.look(pool, schema, names...) {
		if err != nil {
			p.t.Errorf("%s, schema %q: %v", name, schema, err)
		}
	}
}

// wantUntrusted wants these to refuse, without names all and the doctor, and to say why; advisory locks
// without tokens do without a schema unless it is named.
func (p *planted) wantUntrusted(pool *pgxpool.Pool, named string, want place.UntrustedError, names ...string) {
	p.t.Helper()
	for name, err := range p.look(pool, named, names...) {
		untrusted, ok := errors.AsType[*place.UntrustedError](err)
		switch {
		case name == "advisory" && named == "" && err == nil:
		case !ok || !errors.Is(err, pgxlock.ErrSchema):
			p.t.Errorf("%s, schema %q: %v, want %v", name, named, err, &want)
		case untrusted.Schema != want.Schema || untrusted.Owner != want.Owner || untrusted.Named != (named != ""):
			p.t.Errorf("%s, schema %q: %v, want %v", name, named, untrusted, &want)
		}
	}
	if len(names) > 0 {
		return
	}
	findings, err := doctor.Check(p.t.Context(), pool, &doctor.Config{Schema: named})
	p.wantNotRun("the doctor")
	if i := slices.IndexFunc(findings, func(f doctor.Finding) bool { return f.Check == "schema" }); err != nil || i < 0 ||
		findings[i].Status != doctor.StatusError || !strings.Contains(findings[i].Detail, want.Owner.Role) {
		p.t.Errorf("the doctor: %v, %v", findings, err)
	}
}

// lookers are those who look for pgxlock; each returns what kept it from it.
var lookers = map[string]func(ctx context.Context, pool *pgxpool.Pool, schema string) error{
	"lease": func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
		l, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{Schema: schema})
		if err != nil {
			return err
		}
		_, err = l.TryAcquire(ctx, "k")
		return errors.Join(err, l.Close(ctx))
	},
	"advisory": func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
		l, err := pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{Schema: schema})
		if err != nil {
			return err
		}
		_, err = l.TryAcquire(ctx, "k")
		if schema == "" && err != nil {
			return fmt.Errorf("it should do without: %v", err) //nolint:errorlint // it must not match ErrSchema
		}
		return errors.Join(err, l.Close(ctx))
	},
	"tokens": func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
		l, err := pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{Schema: schema, Tokens: true})
		if err != nil {
			return err
		}
		_, err = l.TryAcquire(ctx, "k")
		return errors.Join(err, l.Close(ctx))
	},
	"once": func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
		r, err := once.New(pool, time.Hour, &once.Config{Schema: schema})
		if err != nil {
			return err
		}
		_, err = r.Do(ctx, "k", func(context.Context, once.Run) error { return nil })
		return errors.Join(err, r.Close(ctx))
	},
	"limit": func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
		l, err := ratelimit.New(pool, ratelimit.Every(time.Hour), 100, &ratelimit.Config{Schema: schema})
		if err != nil {
			return err
		}
		_, err = l.Allow(ctx, "k")
		return errors.Join(err, l.Close(ctx))
	},
	"monitor": func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
		m, err := monitor.New(pool, &monitor.Config{Schema: schema})
		if err != nil {
			return err
		}
		if _, err := m.Snapshot(ctx); err != nil {
			return fmt.Errorf("it should do without: %v", err) //nolint:errorlint // it must not match ErrSchema
		}
		_, err = m.Expired(ctx)
		return err
	},
}

// A role other than the caller's plants what the caller looks for, or will call. The attacks share a
// database, one after the other.
func TestAttackWhatStrangersPlantIsNotCalled(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, attack := range []struct {
		name string
		run  func(*testing.T, *planted)
	}{
		{"where pgxlock is not installed", plantedWithoutPgxlock},
		{"beside pgxlock", plantedBesidePgxlock},
		{"in the schema of pgxlock", plantedInItsSchema},
		{"as the owner of the schema", plantedByTheOwnerOfTheSchema},
		{"as the owner of the database", plantedByTheOwnerOfTheDatabase},
		{"between two connections", plantedBetweenTwoConnections},
		{"after the look", plantedAfterTheLook},
		{"operators", plantedOperators},
		{"in many schemas", plantedInManySchemas},
	} {
		t.Run(attack.name, func(t *testing.T) { attack.run(t, newPlanted(t, db)) })
	}
}

// Every role that may connect may make functions in its temporary schema, and one with CREATE on
// the database, or on a schema, there.
func plantedWithoutPgxlock(t *testing.T, p *planted) {
	p.do("drop schema locks cascade")
	evil := p.role()
	s := p.as(evil)
	s.do("create temporary table made (n int)")
	p.plant(s, s.get("(select nspname from pg_namespace where oid = pg_my_temp_schema())"))
	for name, err := range p.look(p.pool, "") {
		if name != "advisory" && (!errors.Is(err, pgxlock.ErrSchema) || !strings.Contains(err.Error(), place.ErrNone.Error())) {
			t.Errorf("%s: %v, want ErrSchema and no word of the schema", name, err)
		}
	}
	if _, err := doctor.Check(t.Context(), p.pool, nil); err != nil {
		t.Error(err)
	}
	p.wantNotRun("the doctor")
	if status, err := migrations.Version(t.Context(), p.pool, nil); status.Installed != 0 || err != nil {
		t.Errorf("version %d: %v", status.Installed, err)
	}
	p.wantNotRun("Version")

	p.do("create schema theirs authorization " + evil)
	p.plant(s, "theirs")
	want := place.UntrustedError{Schema: "theirs", Owner: place.Owner{Role: evil, Object: "function acquire_in_turn", Schema: true}}
	for _, pool := range []*pgxpool.Pool{p.pool, p.on("theirs, public")} {
		p.wantUntrusted(pool, "", want)
		_, _ = migrations.Version(t.Context(), pool, nil)
		p.wantNotRun("Version")
		if err := migrations.Up(t.Context(), pool, nil); err == nil || !strings.Contains(err.Error(), "theirs") || !strings.Contains(err.Error(), evil) {
			t.Errorf("Up: %v, want it to name the schema and its owner", err)
		}
		p.wantNotRun("Up")
	}
	p.do("create schema \"" + p.get("current_user") + "\" authorization " + evil)
	if err := migrations.Up(t.Context(), p.on(`"$user", public`), nil); err == nil || !strings.Contains(err.Error(), evil) {
		t.Errorf("Up in a schema that another role can change at any time: %v", err)
	}
}

func plantedBesidePgxlock(t *testing.T, p *planted) {
	evil := p.role()
	s := p.as(evil)
	p.do("create schema theirs authorization " + evil)
	p.plant(s, "theirs")
	s.do("create temporary table made (n int)")
	p.plant(s, s.get("(select nspname from pg_namespace where oid = pg_my_temp_schema())"))
	for _, path := range []string{"public", "theirs", "theirs, locks", "locks, theirs"} {
		p.wantFound(p.on(path), "", "lease", "monitor")
	}
	p.wantFound(p.on("theirs, locks"), "")
	p.wantFound(p.on("theirs"), "locks", "limit")
	if err := migrations.Up(t.Context(), p.on("theirs, locks"), nil); err != nil {
		t.Error(err)
	}
	p.wantNotRun("Up")
}

// What a call resolves to may be an overload, and what a function or a view calls may be another role's.
func plantedInItsSchema(t *testing.T, p *planted) {
	p.do("create schema other")
	evil := p.role()
	s := p.as(evil)
	p.do("grant usage, create on schema locks to " + evil)
	for object, make := range map[string]string{
		"function acquire_lock":    "create function locks.acquire_lock(text, text) returns boolean language sql as $$ select nextval('public.ran') > 0 $$",
		"function pgxlock_version": "create function locks.pgxlock_version(integer default 1) returns bigint language sql as $$ select nextval('public.ran') $$",
		"function pgxlock_mine":    "create function locks.pgxlock_mine() returns bigint language sql as $$ select nextval('public.ran') $$",
		"view pgxlock_mine":        "create view locks.pgxlock_mine as select nextval('public.ran')",
		"table pgxlock_mine":       "create table locks.pgxlock_mine (n bigint default nextval('public.ran'))",
	} {
		s.do("begin; " + make + "; commit")
		want := place.UntrustedError{Schema: "locks", Owner: place.Owner{Role: evil, Object: object}}
		p.wantUntrusted(p.pool, "", want, "limit", "monitor")
		p.wantUntrusted(p.pool, "locks", want, "limit", "monitor")
		kind, name, _ := strings.Cut(object, " ")
		if kind == "function" {
			name = s.get("(select oid::regprocedure from pg_proc where pronamespace = 'locks'::regnamespace and proowner = current_user::regrole)")
			s.do("drop function " + name)
			continue
		}
		s.do("drop " + kind + " locks." + name)
	}
	for _, name := range strings.Fields(p.get(`(select string_agg(name, ' ') from (
			select proname as name from pg_proc where pronamespace = 'locks'::regnamespace union
			select relname from pg_class where relnamespace = 'locks'::regnamespace and relkind in ('r', 'v', 'S')) o
			where not starts_with(name, 'pgxlock_'))`)) {
		if !regexp.MustCompile(`[{ ]` + name + `[,}]`).MatchString(place.LookSQL) {
			t.Errorf("internal/place/look.sql leaves out %s", name)
		}
	}
	// What has other names is the users' own.
	s.do("create function locks.pgxlocked() returns int language sql as 'select 1'; create table locks.orders (n int)")
	p.wantFound(p.pool, "")
}

// The owner of a schema can replace what is in it, no matter who made it, after a caller has looked.
func plantedByTheOwnerOfTheSchema(t *testing.T, p *planted) {
	app, stranger := p.role(), p.role()
	p.do("alter schema locks owner to " + app)
	want := place.UntrustedError{Schema: "locks", Owner: place.Owner{Role: app, Object: "schema ", Schema: true}}
	p.wantUntrusted(p.pool, "", want)
	p.wantFound(p.pool, "locks")

	p.do("create schema own authorization " + app)
	p.do("grant create on database " + p.get("quote_ident(current_database())") + " to " + app)
	theirs := pgtest.Pool(t, p.url, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = app })
	if err := migrations.Up(t.Context(), theirs, &migrations.Config{Schema: "own"}); err != nil {
		t.Fatal(err)
	}
	p.do("drop schema locks cascade")
	want = place.UntrustedError{Schema: "own", Owner: place.Owner{Role: app, Object: "function acquire_in_turn", Schema: true}}
	for _, pool := range []*pgxpool.Pool{p.pool, p.on("own"), theirs} {
		p.wantUntrusted(pool, "", want, "limit", "monitor")
		p.wantFound(pool, "own", "limit", "monitor")
	}
	if err := migrations.Up(t.Context(), theirs, nil); err == nil || !strings.Contains(err.Error(), "own") {
		t.Errorf("Up off the search_path: %v", err)
	}
	p.do("alter role " + app + " set search_path = own")
	findings, err := doctor.Check(t.Context(), p.pool, &doctor.Config{Schema: "own"})
	if i := slices.IndexFunc(findings, func(f doctor.Finding) bool { return f.Check == "schema" }); err != nil || i < 0 ||
		findings[i].Status != doctor.StatusWarning || !strings.Contains(findings[i].Detail, app) || !strings.Contains(findings[i].Detail, "superuser") {
		t.Errorf("the doctor: %v, %v", findings, err)
	}

	p.do("alter function own.pgxlock_version() owner to " + stranger)
	p.wantUntrusted(p.pool, "own", place.UntrustedError{Schema: "own", Owner: place.Owner{Role: stranger, Object: "function pgxlock_version"}})
}

func plantedByTheOwnerOfTheDatabase(t *testing.T, p *planted) {
	app := p.role()
	database, owner := p.get("quote_ident(current_database())"), p.get("quote_ident(current_user)")
	t.Cleanup(func() {
		if _, err := p.pool.Exec(context.Background(), "alter database "+database+" owner to "+owner); err != nil {
			t.Error(err)
		}
	})
	p.do("drop schema locks cascade; alter database " + database + " owner to " + app)
	theirs := pgtest.Pool(t, p.url, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = app })
	if err := migrations.Up(t.Context(), theirs, nil); err != nil { // in public, which belongs to pg_database_owner
		t.Fatal(err)
	}
	for _, pool := range []*pgxpool.Pool{p.pool, theirs} {
		p.wantFound(pool, "")
	}
}

// A schema may be dropped, and made by another role, while a program runs.
func plantedBetweenTwoConnections(t *testing.T, p *planted) {
	evil := p.role()
	s := p.as(evil)
	for _, named := range []string{"", "locks"} {
		locks, err := pgxlock.NewLeaseLocker(p.pool, &pgxlock.LeaseConfig{Schema: named, Owner: "victim"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := locks.TryAcquire(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		p.do("drop schema locks cascade; create schema locks; grant usage, create on schema locks to " + evil)
		p.do("select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity where datname = current_database() and application_name like 'pgxlock victim%'")
		p.plant(s, "locks")
		_, err = locks.TryAcquire(t.Context(), "other")
		if _, ok := errors.AsType[*place.UntrustedError](err); !ok || !errors.Is(err, pgxlock.ErrSchema) {
			t.Errorf("schema %q: %v, want an UntrustedError", named, err)
		}
		p.wantNotRun("the next connection")
		_ = locks.Close(t.Context())
		p.do("drop schema locks cascade")
		p.install("locks")
	}
}

// A role that may create in the schema can do so after a connection has looked.
func plantedAfterTheLook(t *testing.T, p *planted) {
	evil := p.role()
	s := p.as(evil)
	p.do("grant usage, create on schema locks to " + evil)
	leases, err := pgxlock.NewLeaseLocker(p.pool, &pgxlock.LeaseConfig{Schema: "locks"})
	if err != nil {
		t.Fatal(err)
	}
	advisory, err := pgxlock.NewAdvisoryLocker(p.pool, &pgxlock.AdvisoryConfig{Schema: "locks", Tokens: true})
	if err != nil {
		t.Fatal(err)
	}
	use := func(locks *pgxlock.Locker, mode pgxlock.Mode) {
		t.Helper()
		lock, err := locks.TryAcquire(t.Context(), "k", mode)
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(lock.Renew(t.Context()), pgx.BeginFunc(t.Context(), p.pool, func(tx pgx.Tx) error { return lock.Fence(t.Context(), tx) }))
		_, held := locks.Holders(t.Context(), "k")
		if err := errors.Join(err, held, lock.Release(t.Context())); err != nil {
			t.Error(err)
		}
	}
	all := func() {
		for _, mode := range []pgxlock.Mode{pgxlock.Exclusive, pgxlock.Shared} {
			use(leases, mode)
			use(advisory, mode)
		}
	}
	all()
	// Of unknown types and such as need a cast, text is preferred, and what has fewer arguments to fill in.
	n := 0
	for _, types := range [][2]string{{"varchar", "text"}, {"varchar|integer|bigint|boolean|interval", "text"}, {"integer", "bigint"}, {"text", "varchar"}} {
		makes := p.get(`(select string_agg(format('create function locks.%I(%s) returns %s language plpgsql volatile as $f$ begin perform nextval(''public.ran''); raise ''ran''; end $f$', proname, a, pg_get_function_result(oid)), e'\n;;\n')
			from (select oid, proname, pg_get_function_identity_arguments(oid) as had, regexp_replace(replace(pg_get_function_identity_arguments(oid), 'character varying', 'varchar'), '\m(` + types[0] + `)(?=$|,)', '` + types[1] + `', 'g') as a
			        from pg_proc where pronamespace = 'locks'::regnamespace and proowner <> '` + evil + `'::regrole) f
			where replace(had, 'character varying', 'varchar') <> a and had !~ 'OUT |locks\.' and pg_get_function_result(oid) !~ 'locks\.')`)
		for _, sql := range strings.Split(makes, "\n;;\n") {
			if s.run(sql) == nil { // there may be one with these types
				n++
			}
		}
	}
	if n < 50 {
		t.Fatalf("only %d overloads", n)
	}
	p.pool.Reset() // a statement that was prepared calls what it found
	all()
	p.wantNotRun("a Locker that had looked before")
	if err := errors.Join(leases.Close(t.Context()), advisory.Close(t.Context())); err != nil {
		t.Error(err)
	}
}

// Until search_path is set it is the role's, and may even name a stranger's schema before pg_catalog.
func plantedOperators(t *testing.T, p *planted) {
	evil := p.role()
	p.do("create schema theirs authorization " + evil)
	s := p.as(evil)
	p.plant(s, "theirs")
	s.do(`do $$ declare f record; begin
		for f in select oid, proname, proretset, pg_get_function_arguments(oid) as arguments, pg_get_function_result(oid) as result from pg_proc
		          where pronamespace = 'pg_catalog'::regnamespace and prokind = 'f' and not proretset and pronargs < 3
		            and proname in (select oprcode::text from pg_operator) or oid in (
		              'pg_catalog.starts_with(text, text)'::regprocedure, 'pg_catalog.current_schemas(boolean)'::regprocedure, 'pg_catalog.pg_backend_pid()'::regprocedure,
		              'pg_catalog.current_database()'::regprocedure, 'pg_catalog.set_config(text, text, boolean)'::regprocedure,
		              'pg_catalog.current_setting(text)'::regprocedure, 'pg_catalog.pg_is_in_recovery()'::regprocedure, 'pg_catalog.pg_get_function_sqlbody(oid)'::regprocedure,
		              'pg_catalog.substring(text, text)'::regprocedure, 'pg_catalog.clock_timestamp()'::regprocedure, 'pg_catalog.has_schema_privilege(oid, text)'::regprocedure) loop
		  begin
		    execute format('create function theirs.%I(%s) returns %s language plpgsql volatile as $f$ begin perform pg_catalog.nextval(''public.ran''); raise ''ran''; end $f$', f.proname, f.arguments, f.result);
		  exception when others then null;     -- a pseudo-type, or an argument's default
		  end;
		end loop;
		for f in select o.oprname, o.oprleft::regtype as l, o.oprright::regtype as r, p.proname from pg_operator o join pg_proc p on p.oid = o.oprcode
		          where o.oprleft <> 0 and o.oprright <> 0 and o.oprnamespace = 'pg_catalog'::regnamespace loop
		  begin
		    execute format('create operator theirs.%s (leftarg = %s, rightarg = %s, function = theirs.%I)', f.oprname, f.l, f.r, f.proname);
		  exception when others then null;
		  end;
		end loop; end $$`)
	if p.get("(select count(*) > 400 from pg_operator where oprnamespace = 'theirs'::regnamespace)") != "true" {
		t.Fatal("there are not enough operators")
	}
	for _, path := range []string{"theirs, pg_catalog, locks", "theirs, locks"} {
		p.wantFound(p.on(path), "")
		p.wantFound(p.on(path), "locks", "limit", "monitor")
		for name, ask := range map[string]func() error{
			"Version":     func() error { _, err := migrations.Version(t.Context(), p.on(path), nil); return err },
			"the doctor":  func() error { _, err := doctor.Check(t.Context(), p.on(path), nil); return err },
			"PurgeClaims": func() error { _, err := pgxlock.PurgeClaims(t.Context(), p.on(path), time.Hour); return err },
		} {
			if err := ask(); err != nil {
				t.Errorf("%s, search_path %s: %v", name, path, err)
			}
			p.wantNotRun(name)
		}
	}
}

// A role that may create schemas makes many, and a look reads each a few times, and not as often as there are others.
func plantedInManySchemas(t *testing.T, p *planted) {
	const schemas = 300
	evil := p.role()
	p.do("grant create on database " + p.get("quote_ident(current_database())") + " to " + evil)
	p.as(evil).do(fmt.Sprintf(`do $$ begin for i in 1..%d loop
		execute format('create schema %%I', 'many ' || i);
		execute format('create function %%I.pgxlock_version() returns bigint language sql return 8', 'many ' || i);
		execute format('create function %%I.acquire_lock(varchar, varchar, integer, jsonb) returns boolean language sql return true', 'many ' || i);
	end loop; end $$`, schemas))
	if rows := p.reads(place.LookSQL, ""); rows > schemas*schemas {
		t.Errorf("a look reads %.0f rows among %d schemas", rows, schemas)
	}
}

// reads runs a statement, and returns how many rows the parts of its plan looked at in all.
func (d *database) reads(sql string, args ...any) float64 {
	d.t.Helper()
	type node struct {
		Rows     float64 `json:"Actual Rows"`
		Filtered float64 `json:"Rows Removed by Filter"`
		Unjoined float64 `json:"Rows Removed by Join Filter"`
		Loops    float64 `json:"Actual Loops"`
		Plans    []node
	}
	var plan []struct{ Plan node }
	args = append([]any{pgx.QueryExecModeSimpleProtocol}, args...)
	if err := d.conn.QueryRow(d.t.Context(), "explain (analyze, timing off, format json) "+sql, args...).Scan(&plan); err != nil {
		d.t.Fatal(err)
	}
	var sum func(n node) float64
	sum = func(n node) float64 {
		rows := (n.Rows + n.Filtered + n.Unjoined) * n.Loops
		for _, part := range n.Plans {
			rows += sum(part)
		}
		return rows
	}
	return sum(plan[0].Plan)
}
