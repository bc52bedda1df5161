// Attacks on the search for pgxlock: a role plants what has its names, for others to call.

package sqltest_test

import (
	"context"
	"errors"
	"fmt"
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

func newPlanted(t *testing.T) *planted {
	t.Helper()
	db := pgtest.New(t)
	db.Exec(t, "create sequence public.ran; grant all on sequence public.ran to public")
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

// look lets all look for pgxlock, and returns the error of each.
func (p *planted) look(pool *pgxpool.Pool, schema string) map[string]error {
	p.t.Helper()
	found := make(map[string]error)
	for name, look := range lookers {
		found[name] = look(p.t.Context(), pool, schema)
		p.wantNotRun(name)
	}
	return found
}

// wantFound wants all to work.
func (p *planted) wantFound(pool *pgxpool.Pool, schema string) {
	p.t.Helper()
	for name, err := range p.look(pool, schema) {
		if err != nil {
			p.t.Errorf("%s, schema %q: %v", name, schema, err)
		}
	}
}

// wantUntrusted wants all to refuse, and to say why; advisory locks without tokens do without a
// schema unless it is named.
func (p *planted) wantUntrusted(pool *pgxpool.Pool, named string, want place.UntrustedError) {
	p.t.Helper()
	for name, err := range p.look(pool, named) {
		untrusted, ok := errors.AsType[*place.UntrustedError](err)
		switch {
		case name == "advisory" && named == "" && err == nil:
		case !ok || !errors.Is(err, pgxlock.ErrSchema):
			p.t.Errorf("%s, schema %q: %v, want %v", name, named, err, &want)
		case untrusted.Schema != want.Schema || untrusted.Owner != want.Owner || untrusted.Named != (named != ""):
			p.t.Errorf("%s, schema %q: %v, want %v", name, named, untrusted, &want)
		}
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
		m, err := pgxlock.NewMonitor(pool, &pgxlock.MonitorConfig{Schema: schema})
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

// Every role that may connect may make functions in its temporary schema, and one with CREATE on
// the database, or on a schema, there.
func TestAttackStrangersFunctionsAreNotCalledWherePgxlockIsNotInstalled(t *testing.T) {
	t.Parallel()
	p := newPlanted(t)
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
	if installed, _, err := migrations.Version(t.Context(), p.pool, nil); installed != 0 || err != nil {
		t.Errorf("version %d: %v", installed, err)
	}
	p.wantNotRun("Version")

	p.do("create schema theirs authorization " + evil)
	p.plant(s, "theirs")
	want := place.UntrustedError{Schema: "theirs", Owner: place.Owner{Role: evil, Object: "function acquire_lock"}}
	for _, pool := range []*pgxpool.Pool{p.pool, p.on("theirs, public")} {
		p.wantUntrusted(pool, "", want)
		_, _, _ = migrations.Version(t.Context(), pool, nil)
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

func TestAttackStrangersFunctionsKeepNobodyFromPgxlock(t *testing.T) {
	t.Parallel()
	p := newPlanted(t)
	evil := p.role()
	s := p.as(evil)
	p.do("create schema theirs authorization " + evil)
	p.plant(s, "theirs")
	s.do("create temporary table made (n int)")
	p.plant(s, s.get("(select nspname from pg_namespace where oid = pg_my_temp_schema())"))
	for _, path := range []string{"public", "theirs", "theirs, locks", "locks, theirs"} {
		p.wantFound(p.on(path), "")
	}
	p.wantFound(p.on("theirs"), "locks")
	if err := migrations.Up(t.Context(), p.on("theirs, locks"), nil); err != nil {
		t.Error(err)
	}
	p.wantNotRun("Up")
}

// What a call resolves to may be an overload, and what a function or a view calls may be another role's.
func TestAttackSchemaWithAnObjectOfAStrangerDoesNotCount(t *testing.T) {
	t.Parallel()
	p := newPlanted(t)
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
		p.wantUntrusted(p.pool, "", want)
		p.wantUntrusted(p.pool, "locks", want)
		kind, name, _ := strings.Cut(object, " ")
		if kind == "function" {
			name = s.get("(select oid::regprocedure from pg_proc where pronamespace = 'locks'::regnamespace and proowner = current_user::regrole)")
			s.do("drop function " + name)
			continue
		}
		s.do("drop " + kind + " locks." + name)
	}
	// What has other names is the users' own.
	s.do("create function locks.pgxlocked() returns int language sql as 'select 1'; create table locks.orders (n int)")
	p.wantFound(p.pool, "")
}

// The owner of a schema can replace what is in it, whoever made it, after a caller has looked.
func TestOwnerOfTheSchemaIsTrustedIfTheCallerNamesIt(t *testing.T) {
	t.Parallel()
	p := newPlanted(t)
	app, stranger := p.role(), p.role()
	p.do("alter schema locks owner to " + app)
	want := place.UntrustedError{Schema: "locks", Owner: place.Owner{Role: app, Object: "schema "}}
	p.wantUntrusted(p.pool, "", want)
	p.wantFound(p.pool, "locks")

	p.do("create schema own authorization " + app)
	p.do("grant create on database " + p.get("quote_ident(current_database())") + " to " + app)
	theirs := pgtest.Pool(t, p.url, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = app })
	if err := migrations.Up(t.Context(), theirs, &migrations.Config{Schema: "own"}); err != nil {
		t.Fatal(err)
	}
	p.do("drop schema locks cascade")
	want = place.UntrustedError{Schema: "own", Owner: place.Owner{Role: app, Object: "function acquire_lock"}}
	for _, pool := range []*pgxpool.Pool{p.pool, p.on("own"), theirs} {
		p.wantUntrusted(pool, "", want)
		p.wantFound(pool, "own")
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

func TestOwnerOfTheDatabaseIsTrusted(t *testing.T) {
	t.Parallel()
	p := newPlanted(t)
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
func TestAttackEachConnectionLooksWhoseTheSchemaIs(t *testing.T) {
	t.Parallel()
	p := newPlanted(t)
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
