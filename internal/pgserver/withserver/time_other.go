//go:build !unix

package withserver

func processorTime() string { return "processor time is not measured here" }
