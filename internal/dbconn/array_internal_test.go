package dbconn

import "testing"

func TestForeignBytesAreNoArray(t *testing.T) {
	t.Parallel()
	var args Arguments
	AddBigints(&args, []int64{1, 2}, func(n int64) (int64, bool) { return n, true })
	whole := args.values()[0]
	for cut := range whole {
		array, n, err := ReadArray(whole[:cut])
		if cut < 20 && err == nil {
			t.Errorf("%d bytes are an array of %d", cut, n)
		}
		for range n {
			array.Next()
		}
	}
	whole[3] = 2
	if _, _, err := ReadArray(whole); err == nil {
		t.Error("an array of two dimensions is read as one")
	}
}
