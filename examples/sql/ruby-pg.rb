# Settles invoice 42 under a lease, with Ruby's pg.
require "pg"
require "securerandom"
require "socket"

name = "invoice:42"
holder = "#{Socket.gethostname}:#{Process.pid}:#{SecureRandom.uuid}"
conn = PG.connect # commits each statement outside of conn.transaction

# "t" or "f", and both are true in Ruby. With a type map for results: true or false.
acquired = conn.exec_params("SELECT acquire_lock($1, $2, 60)", [name, holder]).getvalue(0, 0)
if acquired != "t"
  puts "busy: #{acquired.inspect}"
  exit
end

begin
  total = conn.exec("SELECT invoice_total(42)").getvalue(0, 0) # slow
  conn.transaction do
    conn.exec_params("SELECT assert_lock_held($1, $2)", [name, holder])
    conn.exec_params("UPDATE invoices SET total = $1 WHERE id = 42", [total])
  end
  puts "settled"
rescue PG::ServerError => e
  raise unless e.result.error_field(PG::PG_DIAG_SQLSTATE) == "LK001"
  puts "lost"
ensure
  conn.exec_params("SELECT release_lock($1, $2)", [name, holder])
  conn.exec_params("SELECT wake_lock_waiter($1)", [name])
end
