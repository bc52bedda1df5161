package lockkey_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

var withKeys = pgtest.NewTemplate(func(ctx context.Context, pool *pgxpool.Pool) error { return migrations.Up(ctx, pool, nil) })

// The mark of pgxlock's own keys is written down in Go and in SQL: Go computes keys where
// nothing is installed, and SQL the others.
func TestOwnKeysAreTheSameInGoAndInSQL(t *testing.T) {
	t.Parallel()
	db := withKeys.New(t)
	ask := func(expression string) (key int64, own bool) {
		t.Helper()
		if err := db.Pool.QueryRow(t.Context(), fmt.Sprintf("select k, pgxlock_is_own_key(1, k) from (select %s as k) k", expression)).Scan(&key, &own); err != nil {
			t.Fatalf("%s: %v", expression, err)
		}
		return key, own
	}
	for _, number := range []int64{0, 7, -1, 1 << 40, -1 << 63, 1<<63 - 1} {
		for of, inGo := range map[string]int64{"pgxlock_session_key": lockkey.SessionKey(number), "pgxlock_waiter_key": lockkey.WaiterKey(number)} {
			if key, own := ask(fmt.Sprintf("%s('%d')", of, number)); key != inGo || !own {
				t.Errorf("%s(%d) is %d in SQL, own: %t, and %d in Go", of, number, key, own, inGo)
			}
		}
	}
	for expression, label := range map[string]string{
		"pgxlock_session_key(7)":              "pgxlock: liveness of a session",
		"pgxlock_waiter_key(7)":               "pgxlock: liveness of a session",
		"pgxlock_key('guard', 'k')":           "pgxlock: guard or pin of a transaction",
		"pgxlock_share_pin('k', 'h')":         "pgxlock: guard or pin of a transaction",
		"pgxlock_advisory_pin(1, 42, 7)":      "pgxlock: guard or pin of a transaction",
		"advisory_lock_key('order:23115415')": "pgxlock: guard or pin of a transaction", // by chance
		"advisory_lock_key('order:60938740')": "pgxlock: liveness of a session",
		"advisory_lock_key('invoice:42')":     "",
		"7::bigint":                           "",
		"'-1'::bigint":                        "",
		"x'706c690fffffffff'::bigint":         "",
		"x'706c6c0000000000'::bigint":         "",
	} {
		key, own := ask(expression)
		id := lockkey.ID{Number: key}
		if id.IsOwn() != own || own != (label != "") || own && id.OwnLabel(false) != label {
			t.Errorf("%s: own: %t in SQL, %t in Go, %q", expression, own, id.IsOwn(), id.OwnLabel(false))
		}
		if (lockkey.ID{Number: key, Pair: true}).IsOwn() {
			t.Errorf("%s: of two integers it is own", expression)
		}
	}
}
