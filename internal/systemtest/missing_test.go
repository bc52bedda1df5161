package systemtest_test

import (
	"context"
	"database/sql"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"iter"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/monitor"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// receivers are pointers of every type that has methods, which can be used without a
// server. That of *Error is left out: a nil *Error is no error.
func receivers(t *testing.T) []any {
	t.Helper()
	locks := pgxlock.NewMemoryLocker()
	lock, err := locks.Acquire(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	semaphore, err := locks.Semaphore(1)
	if err != nil {
		t.Fatal(err)
	}
	runner, err := once.NewMemory(time.Hour, nil)
	if err != nil {
		t.Fatal(err)
	}
	limiter, err := ratelimit.NewMemory(1, 1)
	if err != nil {
		t.Fatal(err)
	}
	reservation, err := limiter.Reserve(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	pool, err := pgxpool.New(t.Context(), "postgres://localhost/never_asked")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	mon, err := monitor.New(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	return []any{locks, lock, semaphore, runner, limiter, reservation, mon}
}

// takeContexts are the functions that take a context.
var takeContexts = map[string]any{
	"AnswerSQLTx": func(ctx context.Context, key string) ([]byte, error) {
		return pgxlock.AnswerSQLTx(ctx, nil, key, nil, func() ([]byte, error) { return nil, nil })
	},
	"AnswerTx": func(ctx context.Context, key string) ([]byte, error) {
		return pgxlock.AnswerTx(ctx, nil, key, nil, func() ([]byte, error) { return nil, nil })
	},
	"ClaimSQLTx": pgxlock.ClaimSQLTx,
	"ClaimTx":    pgxlock.ClaimTx,
	"Check":      doctor.Check,
	"DoSQLTx": func(ctx context.Context, key string) error {
		return pgxlock.DoSQLTx(ctx, pgxlock.NewMemoryLocker(), key, func(context.Context) (*sql.Tx, error) { return nil, nil }, nil)
	},
	"List":             once.List,
	"LockAllSQLTx":     pgxlock.LockAllSQLTx,
	"LockAllTx":        pgxlock.LockAllTx,
	"LockSQLTx":        pgxlock.LockSQLTx,
	"LockTx":           pgxlock.LockTx,
	"PurgeClaims":      pgxlock.PurgeClaims,
	"PurgeClaimsSQLTx": pgxlock.PurgeClaimsSQLTx,
}

func TestMethodsOfNilReceiversReturnAnErrorOrNothing(t *testing.T) {
	t.Parallel()
	all := needy(t)
	for _, receiver := range receivers(t) {
		of := reflect.TypeOf(receiver)
		for method := range of.Methods() {
			name := of.Elem().Name() + "." + method.Name
			if !all[name] {
				continue // it is a test's
			}
			t.Run(name, func(t *testing.T) {
				results := callWithNothing(t.Context(), t, method.Func, reflect.Zero(of))
				says(t, results, "the "+of.Elem().Name()+" is nil; ")
			})
		}
	}
}

func TestCallsWithoutAContextReturnAnError(t *testing.T) {
	t.Parallel()
	all := make(map[string][2]reflect.Value)
	for name, function := range takeContexts {
		all[name] = [2]reflect.Value{reflect.ValueOf(function)}
	}
	for _, receiver := range receivers(t) {
		of := reflect.TypeOf(receiver)
		for method := range of.Methods() {
			if takesContext(method.Type) {
				all[of.Elem().Name()+"."+method.Name] = [2]reflect.Value{method.Func, reflect.ValueOf(receiver)}
			}
		}
	}
	for name, call := range all {
		t.Run(name, func(t *testing.T) {
			var none context.Context
			results := callWithNothing(none, t, call[0], call[1])
			says(t, results, "the context is nil; ")
		})
	}
}

// A lock is given back also where the context is missing: what is deferred, its error
// is seldom looked at.
func TestReleaseWithoutAContextReleases(t *testing.T) {
	t.Parallel()
	locks := pgxlock.NewMemoryLocker()
	lock, err := locks.Acquire(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	var none context.Context
	if err := lock.Release(none); err == nil || !strings.Contains(err.Error(), "the context is nil") {
		t.Errorf("%v", err)
	}
	if err := lock.Err(); !errors.Is(err, pgxlock.ErrReleased) {
		t.Errorf("%v", err)
	}
	if _, err := locks.TryAcquire(t.Context(), "k"); err != nil {
		t.Error(err)
	}
}

func TestLocksWithoutAContextOrWithANilLockDoNotPanic(t *testing.T) {
	t.Parallel()
	var none context.Context
	ctx, cancel := pgxlock.Locks{}.Context(none)
	cancel()
	if ctx.Err() == nil || !strings.Contains(context.Cause(ctx).Error(), "the context is nil") {
		t.Errorf("%v", context.Cause(ctx))
	}
	some := pgxlock.Locks{nil}
	ctx, cancel = some.Context(t.Context())
	cancel()
	for _, err := range []error{context.Cause(ctx), some.Fence(t.Context(), nil), some.FenceSQL(t.Context(), nil), some.Release(t.Context())} {
		if err == nil || !strings.Contains(err.Error(), "the Lock is nil") {
			t.Errorf("%v", err)
		}
	}
}

func TestCallsWithoutAReceiverOrAContextAreAllTested(t *testing.T) {
	t.Parallel()
	tested := map[string]bool{"Error": true, "TickError": true, "Locks": true} // see receivers; Locks has a test of its own
	for _, receiver := range receivers(t) {
		tested[reflect.TypeOf(receiver).Elem().Name()] = true
	}
	for name := range takeContexts {
		tested[name] = true
	}
	all := needy(t)
	for name := range all {
		if of, _, _ := strings.Cut(name, "."); !tested[of] {
			t.Errorf("%s is not tested", name)
		}
	}
	if len(all) < 50 {
		t.Errorf("only %d were found", len(all))
	}
}

// needy are the exported methods of pointers, and what else takes a context.
func needy(t *testing.T) map[string]bool {
	t.Helper()
	var files []string
	for _, public := range []string{"../../*.go", "../../doctor/*.go", "../../once/*.go", "../../ratelimit/*.go"} {
		found, err := filepath.Glob(public)
		if err != nil || len(found) == 0 {
			t.Fatal(found, err)
		}
		files = append(files, found...)
	}
	found := make(map[string]bool)
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			function, ok := d.(*ast.FuncDecl)
			if !ok || !function.Name.IsExported() {
				continue
			}
			name, needs := function.Name.Name, slices.ContainsFunc(function.Type.Params.List, func(p *ast.Field) bool {
				s, ok := p.Type.(*ast.SelectorExpr)
				return ok && s.Sel.Name == "Context"
			})
			if function.Recv != nil {
				of := function.Recv.List[0].Type
				if star, ok := of.(*ast.StarExpr); ok {
					of, needs = star.X, true
				}
				name = of.(*ast.Ident).Name + "." + name
			}
			if needs && ast.IsExported(name) {
				found[name] = true
			}
		}
	}
	return found
}

var contextType = reflect.TypeFor[context.Context]()

func takesContext(function reflect.Type) bool {
	for in := range function.Ins() {
		if in == contextType {
			return true
		}
	}
	return false
}

// callWithNothing calls a function with zero values and this context.
func callWithNothing(ctx context.Context, t *testing.T, function, receiver reflect.Value) []reflect.Value {
	t.Helper()
	defer func() {
		if why := recover(); why != nil {
			t.Fatalf("it panics: %v", why)
		}
	}()
	var in []reflect.Value
	for i := range function.Type().NumIn() {
		of := function.Type().In(i)
		switch {
		case i == 0 && receiver.IsValid():
			in = append(in, receiver)
		case of == contextType && ctx != nil:
			in = append(in, reflect.ValueOf(ctx))
		case i < function.Type().NumIn()-1 || !function.Type().IsVariadic():
			in = append(in, reflect.Zero(of))
		}
	}
	results := function.Call(in)
	for i, result := range results { // what a loop over them would meet
		switch all := result.Interface().(type) {
		case iter.Seq2[[]pgxlock.Holder, error]:
			err := onlyError(t, all)
			results[i] = reflect.ValueOf(&err).Elem()
		case iter.Seq2[monitor.Snapshot, error]:
			err := onlyError(t, all)
			results[i] = reflect.ValueOf(&err).Elem()
		}
	}
	return results
}

func onlyError[V any](t *testing.T, all iter.Seq2[V, error]) (only error) {
	t.Helper()
	n := 0
	for _, err := range all {
		n++
		only = err
	}
	if n != 1 {
		t.Errorf("it yields %d times", n)
	}
	return only
}

// says checks that a call returned an *Error that says so, and nothing else: zero
// values, contexts and channels that have ended.
func says(t *testing.T, results []reflect.Value, want string) {
	t.Helper()
	for _, result := range results {
		switch v := result.Interface().(type) {
		case error:
			if e, ok := errors.AsType[*pgxlock.Error](v); !ok || e.Op == "" || !strings.Contains(v.Error(), want) {
				t.Errorf("%v, want %q", v, want)
			}
		case context.Context:
			if cause := context.Cause(v); v.Err() == nil || !strings.Contains(cause.Error(), want) {
				t.Errorf("%v, %v", v.Err(), cause)
			}
		case context.CancelFunc:
			v()
		case <-chan struct{}:
			select {
			case <-v:
			default:
				t.Error("the channel is open")
			}
		default:
			if result.Type() == reflect.TypeFor[error]() {
				t.Error("no error")
			} else if !result.IsZero() {
				t.Errorf("%v", v)
			}
		}
	}
}
