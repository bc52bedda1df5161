//go:build !race

package dbconn

func afterRead() {}

func beforeWrite() {}
