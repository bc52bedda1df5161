package doctor

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// poolMode is that of the pooler in between.
type poolMode string

const (
	unpooled        poolMode = "" // none: a direct connection
	sessionMode     poolMode = "session"
	transactionMode poolMode = "transaction"
	statementMode   poolMode = "statement"
)

// pooler tells by another backend than was announced that there is one, and its mode
// by what it does.
func (d *doctor) pooler(ctx context.Context) (Finding, error) {
	if d.conn.Direct() {
		return ok("none: backend %d serves this connection", d.conn.PID), nil
	}
	d.mode = transactionMode // until we know that it is better, or worse
	err := d.KeepsBackend(ctx, d.conn.Backend)
	keeps, lookErr := d.conn.Keeps(ctx)
	if lookErr != nil {
		return Finding{}, lookErr
	}
	if err == nil && keeps {
		d.mode = sessionMode
		f := ok("a pooler is in between, in session mode by what it does")
		f.Advice = "an Advisory Locker needs AdvisoryConfig.SessionPooler"
		return f, nil
	}
	if err != nil && !errors.Is(err, lockerr.ErrPooler) {
		return Finding{}, err
	}
	transactions, err := d.keepsTransactions(ctx)
	if err != nil {
		return Finding{}, err
	}
	f := Finding{Status: StatusWarning, Advice: "use NewLeaseLocker, or connect NewAdvisoryLocker to the server itself; where a driver prepares statements the pooler must know them, or set default_query_exec_mode=exec"}
	if transactions {
		f.Detail = "there is a pooler in transaction mode: leases, LockTx and ClaimTx work, advisory locks are refused"
	} else {
		d.mode = statementMode
		f.Detail = "there is a pooler in statement mode: leases work, advisory locks are refused, and so is every transaction: LockTx, ClaimTx and Fence"
		f.add(StatusWarning, "", "for those put the pooler into transaction mode")
	}
	return f, nil
}

// keepsTransactions reports whether a transaction can be begun, on a connection that
// such a pooler closes if not.
func (d *doctor) keepsTransactions(ctx context.Context) (bool, error) {
	conn, err := d.Dial(ctx, dbconn.Dial{})
	if err != nil {
		return false, err
	}
	defer dbconn.CloseQuietly(conn.Conn)
	tx, err := conn.Begin(ctx)
	if state := lockerr.SQLState(err); state != "" && !lockerr.SessionEnded(state) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, tx.Rollback(ctx)
}

// advisory makes the probe of an Advisory Locker: some engines grant every lock.
func (d *doctor) advisory(ctx context.Context) (Finding, error) {
	if d.mode == transactionMode || d.mode == statementMode {
		return Finding{
			Status: StatusWarning, Detail: "not checked: behind this pooler other clients would get the advisory lock",
			Advice: "run it on a connection to the server itself",
		}, nil
	}
	place, err := d.conn.ProbeAdvisory(ctx, lockkey.SessionKey(dbconn.RandomID()))
	if err != nil {
		return Finding{}, err
	}
	if !place.Keeps {
		return Finding{
			Status: StatusError, Detail: "the server grants advisory locks and does not keep them, as some engines that speak PostgreSQL's protocol do",
			Advice: "use a PostgreSQL server: Lockers, LockTx and the migrations refuse this one, see " + lockerr.ManualEngines,
		}, nil
	}
	return ok("the server keeps what it grants"), nil
}

// notify sends a notification from one connection to another: through a pooler, one
// from the connection that listens would arrive, and no other.
func (d *doctor) notify(ctx context.Context) (Finding, error) {
	f := Finding{Status: StatusWarning, Advice: "connect to the server itself; until then waiters poll (Backoff), still first come, first served"}
	if d.mode != unpooled {
		f.Detail = "Lockers do not LISTEN through a pooler: a release by another process is noticed by polling"
		return f, nil
	}
	made, err := d.Dial(ctx, dbconn.Dial{})
	if err != nil {
		return Finding{}, err
	}
	conn := made.Conn
	defer dbconn.CloseQuietly(conn)
	if err := d.outlive(ctx, conn); err != nil {
		return Finding{}, err
	}
	client := dbconn.RandomID()
	listen := strings.ReplaceAll(statements.QueueListen.Text(), "/* client */", strconv.FormatInt(client, 10))
	if _, err := conn.PgConn().Exec(ctx, listen).ReadAll(); err != nil {
		return Finding{}, err
	}
	began := time.Now()
	rows := d.q.Query(ctx, statements.QueueNotify.Text(), client)
	rows.Close()
	if rows.Err() != nil {
		return Finding{}, rows.Err()
	}
	switch err := waitFor(ctx, conn, client); {
	case errors.Is(err, dbconn.ErrUnheard):
		f.Detail = fmt.Sprintf("a notification did not arrive within %s", dbconn.Timeout)
		return f, nil
	case err != nil:
		return Finding{}, err
	}
	return ok("a notification arrived after %s", time.Since(began).Round(time.Microsecond)), nil
}

// waitFor waits for the notification to that client, and for no other one's.
func waitFor(ctx context.Context, conn *pgx.Conn, client int64) error {
	patient, cancel := context.WithTimeout(ctx, dbconn.Timeout)
	defer cancel()
	for {
		switch n, err := conn.WaitForNotification(patient); {
		case err != nil && patient.Err() != nil && ctx.Err() == nil:
			return dbconn.ErrUnheard
		case err != nil:
			return err
		case n.Channel == "pgxlock_"+strconv.FormatInt(client, 10):
			return nil
		}
	}
}
