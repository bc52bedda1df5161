package testkit

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// HoldReleases keeps the releases of an owner from committing, at their end. Its result lets
// them commit. A trigger of the test may wait at the other gate, 'ticket'.
func HoldReleases(t *testing.T, db *pgtest.DB, owner string) (commit func()) {
	t.Helper()
	db.Exec(t, `create table gates (name text primary key);
		insert into gates values ('release'), ('ticket');
		create function wait_at_gate() returns trigger language plpgsql as $$
		begin
		  while exists (select from public.gates where name = tg_argv[0]) loop perform pg_sleep(0.001); end loop;
		  return coalesce(new, old);
		end $$;
		create constraint trigger held after delete on distributed_locks deferrable initially deferred
		  for each row when (old.holder_id like '`+owner+`:%') execute function wait_at_gate('release')`)
	return func() { db.Exec(t, "delete from gates where name = 'release'") }
}

// UntilAtGate waits until n sessions wait at a gate.
func UntilAtGate(t *testing.T, db *pgtest.DB, n int) {
	t.Helper()
	pgtest.Until(t, fmt.Sprint(n, " wait at a gate"), func() bool {
		return Query[int](t, db, "select count(distinct pid) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'") == n
	})
}
