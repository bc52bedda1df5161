# Settles invoice 42 under a lease, with ActiveRecord, as code of a Rails request: under the
# query cache, which answers a SELECT that it has seen instead of the server.
require "logger"
require "active_record"
require "securerandom"
require "socket"

ActiveRecord::Base.establish_connection(adapter: "postgresql") # to the server of the PG* variables
ActiveRecord::Base.connection # cache does nothing before the first one

# Calls a function of pgxlock. In uncached each call reaches the server.
def pgxlock(sql, *values)
  ActiveRecord::Base.uncached do
    ActiveRecord::Base.connection.select_value(ActiveRecord::Base.sanitize_sql([sql, *values]))
  end
end

# A transaction that fails if the lease is lost.
def fenced(name, holder)
  ActiveRecord::Base.transaction do
    pgxlock("SELECT assert_lock_held(?, ?)", name, holder)
    yield ActiveRecord::Base.connection
  end
end

def settle(name, holder)
  acquired = pgxlock("SELECT acquire_lock(?, ?, 60)", name, holder) # true or false
  if !acquired
    puts "busy: #{acquired.inspect}"
    return
  end
  begin
    id = fenced(name, holder) { |db| db.select_value("SELECT id FROM invoices WHERE id = 42 AND total = 0") }
    total = ActiveRecord::Base.connection.select_value("SELECT invoice_total(#{Integer(id)})") # slow
    fenced(name, holder) { |db| db.update("UPDATE invoices SET total = #{Integer(total)} WHERE id = #{Integer(id)}") }
    puts "settled"
  rescue ActiveRecord::StatementInvalid => e
    raise unless e.cause.result.error_field(PG::PG_DIAG_SQLSTATE) == "LK001"
    puts "lost"
  ensure
    pgxlock("SELECT release_lock(?, ?)", name, holder)
    pgxlock("SELECT wake_lock_waiter(?)", name)
  end
end

ActiveRecord::Base.cache do # as Rails does around each request and job
  settle("invoice:42", "#{Socket.gethostname}:#{Process.pid}:#{SecureRandom.uuid}")
end
