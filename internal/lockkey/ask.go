package lockkey

// An Ask is what a statement does with one advisory lock, as advisory/prepare.sql and the
// statements of transactions know it.
type Ask int

// What a statement can do.
const (
	AskTry Ask = iota
	AskTryShared
	AskUnlock
	AskUnlockShared

	askPair = 4 // is added for a lock of two numbers
)

// Of returns the number that stands for doing it with that lock.
func (a Ask) Of(id ID) Ask {
	if id.Pair {
		return a + askPair
	}
	return a
}
