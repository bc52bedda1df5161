package dbconn_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// entry is what a statement asks for in the tests.
type entry struct {
	text   *string
	number *int64
	small  int32
}

func (e entry) String() string {
	return fmt.Sprintf("%v %v %d", orNil(e.text), orNil(e.number), e.small)
}

func orNil[E any](value *E) any {
	if value == nil {
		return nil
	}
	return *value
}

// echo has the server return the arrays that it got, and joined as it reads them.
const echo = `select $1::text[], $2::bigint[], $3::integer[], (select array_agg(coalesce(t, '<null>') || coalesce(b::text, '<null>') || i order by n)
	from unnest($1::text[], $2::bigint[], $3::integer[]) with ordinality as u (t, b, i, n)), null::text[]`

func TestArraysArriveAsTheyWereSent(t *testing.T) {
	t.Parallel()
	conn := pgtest.New(t).Connect(t)
	for _, direct := range []bool{true, false} {
		q := dbconn.Querier{Conn: conn, Direct: direct}
		for _, sent := range [][]entry{
			{},
			{{}},
			{{new("a"), new(int64(1)), 1}},
			{{new(""), new(int64(math.MinInt64)), math.MinInt32}, {}, {new(`{"NULL",\}` + strings.Repeat("ü", 300)), new(int64(math.MaxInt64)), -1}},
		} {
			var args dbconn.Arguments
			for range 2 { // the second time in the memory of the first
				args.Reset(false)
				dbconn.AddTexts(&args, sent, func(e entry) *string { return e.text })
				dbconn.AddBigints(&args, sent, func(e entry) (int64, bool) { return dbconn.OrNull(e.number) })
				dbconn.AddIntegers(&args, sent, func(e entry) int32 { return e.small })
			}
			var got []entry
			var joined []string
			err := q.Answer(t.Context(), echo, &args, func(values [][]byte) error {
				var columns [5]dbconn.Array
				for i, value := range values {
					var n int
					var err error
					if columns[i], n, err = dbconn.ReadArray(value); err != nil || i < 3 && n != len(sent) {
						return fmt.Errorf("column %d: %d elements, %w", i, n, err)
					}
				}
				for range sent {
					var e entry
					if text := columns[0].Next(); text != nil {
						e.text = new(string(text))
					}
					if number, ok := dbconn.Integer(columns[1].Next()); ok {
						e.number = &number
					}
					small, _ := dbconn.Integer(columns[2].Next())
					e.small = int32(small)
					got, joined = append(got, e), append(joined, string(columns[3].Next()))
				}
				for i := range columns {
					if columns[i].Next() != nil {
						return fmt.Errorf("column %d has one more element", i)
					}
				}
				return nil
			})
			if err != nil || fmt.Sprint(got) != fmt.Sprint(sent) {
				t.Errorf("direct %v: sent %v, received %v (%v)", direct, sent, got, err)
			}
			for i, e := range sent {
				want := "<null>"
				if e.text != nil {
					want = *e.text
				}
				if e.number == nil {
					want += "<null>"
				} else {
					want += fmt.Sprint(*e.number)
				}
				if want += fmt.Sprint(e.small); i < len(joined) && joined[i] != want {
					t.Errorf("direct %v: the server read %q, sent was %q", direct, joined[i], want)
				}
			}
		}
	}
}

func TestArgumentsOfASingleEntryAreItsElements(t *testing.T) {
	t.Parallel()
	conn := pgtest.New(t).Connect(t)
	for _, direct := range []bool{true, false} {
		q := dbconn.Querier{Conn: conn, Direct: direct}
		for _, sent := range []entry{{}, {new("a"), new(int64(1)), 1}, {new(""), nil, 2}, {nil, new(int64(math.MinInt64)), math.MinInt32}} {
			var args dbconn.Arguments
			args.Reset(true)
			dbconn.AddTexts(&args, []entry{sent}, func(e entry) *string { return e.text })
			dbconn.AddBigints(&args, []entry{sent}, func(e entry) (int64, bool) { return dbconn.OrNull(e.number) })
			dbconn.AddIntegers(&args, []entry{sent}, func(e entry) int32 { return e.small })
			var got entry
			err := q.Answer(t.Context(), "select $1::text, $2::bigint, $3::integer", &args, func(values [][]byte) error {
				var columns [3]dbconn.Array
				for i := range columns {
					columns[i] = dbconn.SingleElement(values[i])
				}
				if text := columns[0].Next(); text != nil {
					got.text = new(string(text))
				}
				if number, ok := dbconn.Integer(columns[1].Next()); ok {
					got.number = &number
				}
				small, _ := dbconn.Integer(columns[2].Next())
				got.small = int32(small)
				return nil
			})
			if err != nil || fmt.Sprint(got) != fmt.Sprint(sent) {
				t.Errorf("direct %v: sent %v, received %v (%v)", direct, sent, got, err)
			}
		}
	}
}

func TestAnswerIsOneRowThatIsCommitted(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, `create table parent (id int primary key);
		create table child (id int references parent deferrable initially deferred)`)
	conn := db.Connect(t)
	read := func([][]byte) error { return nil }
	for _, direct := range []bool{true, false} {
		q := dbconn.Querier{Conn: conn, Direct: direct}
		var none dbconn.Arguments
		for sql, want := range map[string]string{
			"select 1":                     "",
			"select 1 where false":         dbconn.ErrForeign.Error(),
			"select generate_series(1, 2)": dbconn.ErrForeign.Error(),
			"select 1 / 0":                 "22012",
			"insert into public.child values (1) returning id": "23503", // the row arrives, and then the commit fails
		} {
			for range 2 { // an error leaves a connection that can be used
				err := q.Answer(t.Context(), sql, &none, read)
				got := lockerr.SQLState(err)
				if errors.Is(err, dbconn.ErrForeign) {
					got = dbconn.ErrForeign.Error()
				}
				if got != want {
					t.Errorf("direct %v: %s: %v, want %q", direct, sql, err, want)
				}
			}
		}
		refused := errors.New("refused")
		if err := q.Answer(t.Context(), "select 1", &none, func([][]byte) error { return refused }); !errors.Is(err, refused) {
			t.Errorf("the error of read: %v", err)
		}
	}
}

// A function that a migration makes anew may return other columns. The statement that was
// prepared before fails then, once.
func TestAnswerIsReadAgainAfterItsFunctionHasChanged(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	conn := db.Connect(t)
	q := dbconn.Querier{Conn: conn, Direct: true}
	var none dbconn.Arguments
	columns := func() (n int, err error) {
		err = q.Answer(t.Context(), "select * from f()", &none, func(values [][]byte) error { n = len(values); return nil })
		return n, err
	}
	db.Exec(t, "create function f(out a int) language sql as 'select 1'")
	if n, err := columns(); n != 1 || err != nil {
		t.Fatalf("%d columns, %v", n, err)
	}
	db.Exec(t, "drop function f(); create function f(out a int, out b int) language sql as 'select 1, 2'")
	if _, err := columns(); err == nil {
		t.Error("the old statement did not fail: then nothing has to be prepared again")
	}
	if n, err := columns(); n != 2 || err != nil {
		t.Errorf("%d columns, %v", n, err)
	}
}
