package sqltest_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"io/fs"
	"maps"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The isolation levels, weakest first.
var levels = []string{readCommitted, "repeatable read", "serializable"}

const readCommitted = "read committed"

// tried are those at which a test runs that does the same at each: with -short, that of most
// callers.
func tried() []string {
	if testing.Short() {
		return levels[:1]
	}
	return levels
}

// atEveryLevel runs the test as subtests, one for each isolation level, one
// after the other in the same database.
func atEveryLevel(t *testing.T, test func(t *testing.T, d *database, level string)) {
	t.Helper()
	atEveryLevelOf(t, install(t), test)
}

// atEveryLevelGated is atEveryLevel for tests that use a turnstile.
func atEveryLevelGated(t *testing.T, test func(t *testing.T, d *database, level string)) {
	t.Helper()
	atEveryLevelOf(t, installGated(t), test)
}

func atEveryLevelOf(t *testing.T, shared *database, test func(t *testing.T, d *database, level string)) {
	t.Helper()
	for _, level := range tried() {
		t.Run(level, func(t *testing.T) {
			d := shared.reopen(t)
			d.do("delete from pgxlock_claims")
			test(t, d, level)
		})
	}
}

// database is one that the test has for itself, and a session that looks on.
type database struct {
	*session // no transaction is ever open here
	t        *testing.T
	url      string
	spare    []*session
}

// install makes a database with pgxlock in it, where leases last for an hour unless their
// caller says something else, however slow this machine is. It has the functions of batches.
func install(t *testing.T) *database {
	t.Helper()
	return openLent(t, lasting.New(t))
}

// installGated is install for tests that use a turnstile.
func installGated(t *testing.T) *database {
	t.Helper()
	return openLent(t, gated.New(t))
}

// installAsIs makes a database with pgxlock in it and nothing else.
func installAsIs(t *testing.T) *database {
	t.Helper()
	return openLent(t, installed.New(t))
}

func openLent(t *testing.T, db *pgtest.DB) *database {
	t.Helper()
	lend(t, db)
	return open(t, db.URL)
}

var (
	installed = template()
	lasting   = template(lengthen, batchFunctions)
	gated     = template(lengthen, batchFunctions, turnstileFunction)
)

// lengthen makes an hour of the 30 seconds that a lease lasts if its caller does not say how long.
const lengthen = `
do $$ declare f record; begin
  for f in select oid, pg_get_function_arguments(oid) as arguments from pg_proc where pronamespace = 'public'::regnamespace loop
    if f.arguments ~ 'DEFAULT 30(,|$)' then
      execute regexp_replace(pg_get_functiondef(f.oid), 'DEFAULT 30(?=[,)])', 'DEFAULT 3600');
    elsif f.arguments ~ 'DEFAULT ''00:00:30''::interval' then
      execute regexp_replace(pg_get_functiondef(f.oid), 'DEFAULT ''00:00:30''::interval', 'DEFAULT ''1 hour''::interval');
    end if;
  end loop; end $$`

// template installs pgxlock, and then runs the texts.
func template(texts ...string) *pgtest.Template {
	return pgtest.NewTemplate(func(ctx context.Context, pool *pgxpool.Pool) error {
		err := migrations.Up(ctx, pool, nil)
		for _, text := range texts {
			if err == nil {
				_, err = pool.Exec(ctx, text)
			}
		}
		return err
	}).Keep()
}

// installOn is install for the database postgres of a private server.
func installOn(t *testing.T, server *pgserver.Server) *database {
	t.Helper()
	url := server.URL("postgres")
	if err := migrations.Up(t.Context(), pgtest.Pool(t, url), nil); err != nil {
		t.Fatal(err)
	}
	return open(t, url)
}

// open connects to a database.
func open(t *testing.T, url string) *database {
	t.Helper()
	d := &database{t: t, url: url, session: connect(t, url)}
	d.look = d.session
	return d
}

// reopen gives the database, without leases, to a test that runs after others
// in it. To make a database takes longer than most of the tests here.
func (d *database) reopen(t *testing.T) *database {
	t.Helper()
	d = open(t, d.url)
	// The sessions of the test before were told to end, and end by themselves.
	await(t, d, `not exists (select from pg_stat_activity where datname = current_database()
		and backend_type = 'client backend' and pid <> pg_backend_pid() and state <> 'idle')
		and not exists (select from pg_locks where locktype = 'advisory' and pid <> pg_backend_pid()
		and database = (select oid from pg_database where datname = current_database()))`)
	d.do("delete from distributed_locks")
	return d
}

// connect opens one more session.
func (d *database) connect() *session {
	d.t.Helper()
	if last := len(d.spare) - 1; last >= 0 {
		s := d.spare[last]
		d.spare = d.spare[:last]
		return s
	}
	s := connect(d.t, d.url)
	s.look, s.spare = d.session, &d.spare
	return s
}

// sessions opens two more.
func (d *database) sessions() (a, b *session) {
	d.t.Helper()
	return d.connect(), d.connect()
}

// begin opens one more session, with a transaction.
func (d *database) begin(level string) *session {
	d.t.Helper()
	s := d.connect()
	s.begin(level)
	return s
}

// expire lets a lease run out now, instead of waiting for it.
func (d *database) expire(lock string) {
	d.t.Helper()
	d.do("update distributed_locks set expires_at = clock_timestamp() - interval '1 second' where lock_name = " + quote(lock))
}

// turnstile is a place inside pgxlock's functions where a session can be made
// to wait, so that others come in between two of their statements.
type turnstile struct{ *session }

// turnstile is the one of a database with turnstileFunction.
func (d *database) turnstile() turnstile {
	d.t.Helper()
	return turnstile{d.connect()}
}

// turnstileFunction puts a turnstile in front of every computation of an internal key, which is
// what the functions do just before they try the guard or the pin of a lock.
const turnstileFunction = `
alter function pgxlock_key(text, text) rename to pgxlock_key_itself;
create function pgxlock_key(p_space text, p_name text) returns bigint language plpgsql volatile as $$
begin
  if current_setting('sqltest.stop', true) = p_space then
    if coalesce(current_setting('sqltest.pass', true), '') in ('', '0') then
      perform pg_advisory_lock(1);
      perform pg_advisory_unlock(1);
    else
      perform set_config('sqltest.pass', (current_setting('sqltest.pass')::int - 1)::text, false);
    end if;
  end if;
  return pgxlock_key_itself(p_space, p_name);
end $$`

// stop runs the expression in the session until it is about to try the guard or
// the pin.
func (s turnstile) stop(who *session, space, expression string) *call {
	s.t.Helper()
	s.do("select pg_advisory_lock(1)")
	who.do("set sqltest.stop = " + quote(space))
	c := who.start(expression)
	c.waitsFor(s.session)
	return c
}

// stopLater is stop, but lets the session compute some keys of that kind first.
func (s turnstile) stopLater(who *session, pass int, space, expression string) *call {
	s.t.Helper()
	who.do(fmt.Sprintf("set sqltest.pass = %d", pass))
	return s.stop(who, space, expression)
}

// open lets it go on.
func (s turnstile) open() {
	s.t.Helper()
	s.want("pg_advisory_unlock(1)", "true")
}

// role creates a role that may do nothing yet. It is dropped with the test.
func (d *database) role() (name string) {
	d.t.Helper()
	name = "pgxlock_test_" + strings.ToLower(rand.Text()) // roles belong to the whole server
	d.do("create role " + name)
	d.t.Cleanup(func() {
		late := pgtest.Connect(d.t, d.url) // the test's context and sessions are done
		for _, sql := range []string{"drop owned by " + name + " cascade", "drop role " + name} {
			if _, err := late.Exec(context.Background(), sql); err != nil {
				d.t.Error(err)
			}
		}
	})
	return name
}

// lazy are the settings of a server that loses in a crash what was not flushed
// at a commit: it syncs its files, and its log writer sleeps.
var lazy = map[string]string{"fsync": "on", "wal_writer_delay": "10s", "autovacuum": "off", "bgwriter_lru_maxpages": "0"}

// private starts a server for the test, with pgxlock in its database postgres.
func private(t *testing.T, settings map[string]string) (*pgserver.Server, *database) {
	t.Helper()
	all := maps.Clone(lazy)
	maps.Copy(all, settings)
	server := pgtest.Private(t, pgserver.Config{Settings: all})
	return server, installOn(t, server)
}

// crash crashes the server, starts it again and connects.
func crash(t *testing.T, server *pgserver.Server) *database {
	t.Helper()
	if err := server.Crash(); err != nil {
		t.Fatal(err)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	return open(t, server.URL("postgres"))
}

// upFiles are the texts of the migrations.
func upFiles(t *testing.T) (texts []string) {
	t.Helper()
	names, err := fs.Glob(migrations.FS, "*.up.sql") // sorted
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		text, err := migrations.FS.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(text))
	}
	return texts
}
