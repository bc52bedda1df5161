// Package leaktest fails the tests of a package that leave goroutines behind. Close of a
// Locker promises that none is left (I6), and a test that leaks one disturbs the next.
//
//	func TestMain(m *testing.M) { leaktest.Main(m) }
//
// Packages whose tests need a database use pgtest.Main, which checks the same after it has
// stopped the server. leaktest imports nothing of the project, so that every package can
// use it.
package leaktest

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// looks is how often it is looked, for half a second each time, whether all goroutines have ended
// after the last test. An idle machine takes milliseconds; pgx gives a connection that it had to
// leave 15 s to end. A process that stands still does not look.
const looks = 80

// Main runs the tests of a package, checks for leaked goroutines, and exits.
func Main(m *testing.M) { os.Exit(Check(m.Run())) }

// Check returns the exit code of tests that ended with code: 1 if they passed and goroutines
// are left, which it then prints. Tests that failed often leave goroutines, which would hide
// the failure, so that Check does not look for any.
//
// Goroutines that have one of the ignored functions on their stack may be left: those of a
// library that cannot end them. The caller says why.
func Check(code int, ignored ...string) int {
	if code != 0 {
		return code
	}
	var options []goleak.Option
	for _, function := range ignored {
		options = append(options, goleak.IgnoreAnyFunction(function))
	}
	var err error
	for range looks {
		if err = goleak.Find(options...); err == nil { // takes half a second where there are any
			return 0
		}
	}
	fmt.Fprintln(os.Stderr, "The tests passed and left goroutines behind:", err)
	return 1
}
