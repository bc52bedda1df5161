package usertx

import (
	"context"
	"database/sql"
	"fmt"
	"runtime"
	"sync"
	"weak"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// A Server is where a transaction is. Of the zero Server nothing is remembered.
type Server struct {
	conn *pgx.Conn // carries the answer as well, because to name the database costs more
	db   *sql.DB
}

// keepers are the databases whose server was seen to keep the locks that it grants: texts, and weak
// pointers to an sql.DB.
var keepers sync.Map

// keptKey is the name under which a connection carries that its server keeps locks.
const keptKey = "pgxlock: the server keeps locks"

// name returns the key of keepers. It has the address that the connection leads to: a name of a host
// may lead to several.
func (s Server) name() any {
	if s.db != nil {
		return weak.Make(s.db)
	}
	return fmt.Sprintf("%q at %v", s.conn.Config().Database, s.conn.PgConn().Conn().RemoteAddr())
}

// keeps reports whether the server was seen to keep locks.
func (s Server) keeps() bool {
	if s == (Server{}) {
		return false
	}
	if s.conn != nil {
		if _, known := s.conn.PgConn().CustomData()[keptKey]; known {
			return true
		}
	}
	_, known := keepers.Load(s.name())
	if known && s.conn != nil {
		s.conn.PgConn().CustomData()[keptKey] = true
	}
	return known
}

// remember records that the server keeps locks.
func (s Server) remember() {
	if s == (Server{}) {
		return
	}
	key := s.name()
	if _, known := keepers.LoadOrStore(key, true); !known && s.db != nil {
		runtime.AddCleanup(s.db, func(key any) { keepers.Delete(key) }, key)
	}
}

// CheckKept returns an error unless the server keeps the lock that the transaction was just granted,
// for all callers: some engines grant every lock to every caller, and a worker of Citus excludes only
// its own. It asks once for each database of this process.
func CheckKept(ctx context.Context, tx Tx, id lockkey.ID, shared bool) error {
	server := tx.Server()
	if server.keeps() {
		return nil
	}
	numbers, whats := Columns([]lockkey.ID{id}, shared)
	kept, err := tx.Run(ctx, statements.TxKept.Text(), numbers[0], whats[0])
	if err != nil {
		return err
	}
	if kept == 0 {
		engine := tx.Engine()
		if engine == "" {
			_ = tx.Row(ctx, statements.TxVersion.Text(), &engine) // for the message alone
		}
		return lockerr.NoLocks(engine)
	}
	if kept > 1 {
		workers, err := tx.Run(ctx, statements.ConnWorker.Text())
		if err == nil && workers > 0 {
			err = lockerr.ErrWorker
		}
		if err != nil {
			return err
		}
	}
	server.remember()
	return nil
}
