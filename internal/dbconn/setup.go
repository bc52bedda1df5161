package dbconn

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/sql"
)

// A new connection is ready after two round trips. The first one, identify, asks who is at the
// other end and sets nothing: behind a pooler a setting would reach other clients. It runs
// while an address is still being chosen, so that a connection string with several hosts leads
// to the primary. The second one, Own, is one transaction in the process that answered the
// first.

// identify asks which process serves the connection, and where the schema of a place is; nil:
// it is not needed.
func (c *Conn) identify(ctx context.Context, conn *pgconn.PgConn, in *Installation) error {
	var standby, asOurs, citus bool
	var keepsNone *string // what the server says that it is, if it keeps no locks
	c.notFound, c.cluster = nil, cluster{}
	types := pgtype.NewMap()
	scan := func(into ...any) func(*pgconn.Result) error {
		return func(answer *pgconn.Result) error { return ScanRow(types, answer, into...) }
	}
	all := []question{{step: Step{SQL: statements.ConnBackend.Text()}, read: scan(&standby, &c.PID, &c.started, &asOurs, &citus)}}
	if in != nil {
		if !in.keeps.Load() {
			all = append(all, question{step: Step{SQL: statements.ConnKeeps.Text(), Args: []any{RandomID()}}, read: scan(&keepsNone)})
		}
		if !in.hidden.Load() {
			all = append(all, question{
				step: Step{SQL: statements.ConnCluster.Text()}, read: scan(&c.cluster.system, &c.cluster.timeline),
				refused: func(error) { in.hidden.Store(true) },
			})
		}
		all = append(all, question{
			step: lookStep(in.Asked),
			read: func(answer *pgconn.Result) error {
				c.found, c.notFound = place.Read(func(into ...any) error { return ScanRow(types, answer, into...) })
				return nil
			},
			refused: func(err error) { c.notFound = err }, // what does not need the schema can do without
		})
	}
	err := askAll(ctx, conn, types, all)
	if lockerr.SQLState(err) == lockerr.StateUnsupported { // a standby, and the role's transactions are SERIALIZABLE
		isolation := question{step: Step{SQL: statements.ConnReadCommitted.Text()}, read: func(*pgconn.Result) error { return nil }}
		err = askAll(ctx, conn, types, slices.Insert(all, 0, isolation))
	}
	if err != nil {
		return lockerr.NotPostgres(Engine(conn), err)
	}
	switch {
	case standby:
		return fmt.Errorf("%w: the server is in recovery", lockerr.ErrReadOnly)
	case keepsNone != nil:
		return lockerr.NoLocks(cmp.Or(Engine(conn), *keepsNone))
	}
	if citus {
		worker := false
		found := func(answer *pgconn.Result) error { worker = len(answer.Rows) > 0; return nil }
		if err := askAll(ctx, conn, types, []question{{step: Step{SQL: statements.ConnWorker.Text()}, read: found}}); err != nil {
			return err
		}
		if worker {
			return lockerr.ErrWorker
		}
	}
	c.OtherDefaults = !asOurs
	if in == nil {
		return nil
	}
	in.keeps.Store(true)
	return in.old(c.cluster)
}

// A question is a statement with what becomes of its answer.
type question struct {
	step    Step
	read    func(*pgconn.Result) error
	refused func(error) // the others are asked without it; nil: its error is that of all
}

// askAll asks in one round trip, and once more for each question that the server refuses.
func askAll(ctx context.Context, conn *pgconn.PgConn, types *pgtype.Map, all []question) error {
	for {
		steps := make([]Step, len(all))
		for i, q := range all {
			steps[i] = q.step
		}
		var results []*pgconn.Result
		var failed int
		err := Outlast(ctx, func() (err error) {
			results, failed, err = pipeline(ctx, conn, types, steps)
			return err
		})
		if err == nil {
			for i, q := range all {
				if err := q.read(results[i]); err != nil {
					return err
				}
			}
			return nil
		}
		if !lockerr.Refused(err) || lockerr.SQLState(err) == lockerr.StateCanceled || failed >= len(all) || all[failed].refused == nil {
			return err
		}
		all[failed].refused(err)
		all = slices.Delete(all, failed, failed+1)
	}
}

// Own is how a connection is made fit for its work.
type Own struct {
	Place   *Installation
	Lazy    bool    // the Place need not exist
	Session Step    // sets what the work needs; search_path is still the role's
	Async   bool    // as in [Session]
	Old     Backend // is ended, so that it no longer runs anything; zero: there is none

	// Then returns further statements, which find nothing but by its full name; nil: there are
	// none. schema is that of the Place, "" if it does not exist.
	Then func(schema string) []Step
}

// OwnSession is the settings of a connection whose statements are of the extended protocol.
func OwnSession() Step { return Step{SQL: statements.ConnSession.Text(), Args: []any{false}} }

// ErrSettings means that the server refuses a setting of [Own].
var ErrSettings = errors.New("the server refuses a setting of the connection")

// Own makes the connection fit for its work, whatever the role is set to, in one transaction,
// and returns what the statements of Then answered.
func (c *Conn) Own(ctx context.Context, own Own) (answers []*pgconn.Result, err error) {
	schema, err := own.Place.choose(c)
	if err != nil && (!own.Lazy || !mayLack(err)) {
		return nil, err
	}
	err = Outlast(ctx, func() (err error) {
		answers, err = c.own(ctx, own, schema)
		return err
	})
	return answers, err
}

// mayLack reports whether err, which is why there is no Installation, matters only to what needs
// one.
func mayLack(err error) bool { return errors.Is(err, lockerr.ErrSchema) || lockerr.Refused(err) }

// own is Own with the schema.
func (c *Conn) own(ctx context.Context, own Own, schema string) ([]*pgconn.Result, error) {
	const local = false
	steps := []Step{{SQL: statements.ConnGuard.Text(), Args: []any{c.PID}}, own.Session} // while search_path is still the role's
	const settings = 1
	if own.Async {
		steps = append(steps, Step{SQL: statements.ConnAsync.Text(), Args: []any{local}})
	}
	steps = append(steps, Step{SQL: statements.ConnSearchPath.Text(), Args: []any{local}})
	end := len(steps)
	if own.Old.started != 0 {
		steps = append(steps, Step{SQL: statements.EvictTerminate.Text(), Args: []any{own.Old.PID, own.Old.started}})
	}
	then := len(steps)
	if own.Then != nil {
		steps = append(steps, own.Then(schema)...)
	}
	results, failed, err := pipeline(ctx, c.PgConn(), c.TypeMap(), steps)
	switch {
	case err == nil:
	case !lockerr.Refused(err) || lockerr.SQLState(err) == lockerr.StateCanceled:
		return nil, err
	case failed == 0:
		return nil, SwitchedBackend(c.PID, "another one")
	case failed == settings:
		return nil, fmt.Errorf("%w: %w", ErrSettings, err)
	case end <= failed && failed < then:
		return nil, fmt.Errorf("end the backend of the broken connection: %w", err)
	default:
		return nil, err
	}
	if end < then && len(results[end].Rows) > 0 { // no row if it has ended already
		var ended bool
		if err := ScanRow(c.TypeMap(), results[end], &ended); err != nil {
			return nil, err
		}
		if !ended {
			return nil, fmt.Errorf("%w: the backend of the broken connection, pid %d, does not end", lockerr.ErrUnavailable, own.Old.PID)
		}
	}
	return results[then:], nil
}

// pipeline runs statements in one round trip and one transaction, prepared by nobody, and
// returns what they answered. failed is the first that has no answer.
func pipeline(ctx context.Context, conn *pgconn.PgConn, types *pgtype.Map, steps []Step) (results []*pgconn.Result, failed int, err error) {
	batch := &pgconn.Batch{}
	for _, s := range steps {
		var arguments pgx.ExtendedQueryBuilder
		if err := arguments.Build(types, nil, s.Args); err != nil {
			return nil, 0, err
		}
		batch.ExecParams(s.SQL, arguments.ParamValues, nil, arguments.ParamFormats, nil)
	}
	// An answer out of order, as a proxy may give, ends pgx's watch of the context, not its reading.
	stop := context.AfterFunc(ctx, func() { _ = conn.Conn().Close() })
	results, err = conn.ExecBatch(ctx, batch).ReadAll()
	if !stop() {
		err = lockerr.WithContextError(ctx, err)
	}
	for failed < len(results) && results[failed].Err == nil {
		failed++
	}
	if err == nil && failed != len(steps) { // a proxy has taken the rest elsewhere
		err = ErrForeign
	}
	return results, failed, err
}

// ScanRow reads the only row that a statement answered.
func ScanRow(types *pgtype.Map, result *pgconn.Result, into ...any) error {
	if len(result.Rows) != 1 || len(result.Rows[0]) != len(into) {
		return ErrForeign
	}
	for i, value := range result.Rows[0] {
		field := result.FieldDescriptions[i]
		if err := types.Scan(field.DataTypeOID, field.Format, value, into[i]); err != nil {
			return fmt.Errorf("%w: %w", ErrForeign, err)
		}
	}
	return nil
}
