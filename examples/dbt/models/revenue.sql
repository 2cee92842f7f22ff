-- The inner join loses no order, as both tables are of one cut.
select customers.name as customer, sum(orders.amount) as revenue
from {{ source("sales", "orders") }} as orders
join {{ source("sales", "customers") }} as customers on customers.id = orders.customer_id
group by customers.name
