package pgxlock

import (
	"database/sql"
	"reflect"
	"testing"
)

// What is locked through a *sql.DB or a *sql.Conn would be free at once: such a call does not compile.
func TestSQLTxIsATransactionAlone(t *testing.T) {
	t.Parallel()
	for of, want := range map[reflect.Type]bool{
		reflect.TypeFor[*sql.Tx]():                     true,
		reflect.TypeFor[struct{ *sql.Tx }]():           true, // bun.Tx
		reflect.TypeFor[*struct{ *sql.Tx }]():          true, // *sqlx.Tx
		reflect.TypeFor[*sql.DB]():                     false,
		reflect.TypeFor[*sql.Conn]():                   false,
		reflect.TypeFor[*struct{ *sql.DB }]():          false, // *sqlx.DB, *bun.DB
		reflect.TypeFor[interface{ Commit() error }](): false,
	} {
		if got := of.Implements(reflect.TypeFor[SQLTx]()); got != want {
			t.Errorf("%s: %t, want %t", of, got, want)
		}
	}
}
