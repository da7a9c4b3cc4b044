//! `/debug/tenants.json`: the Tenants that all members have reported, in pages. Only the leader has reports.

use std::sync::Arc;

use axum::Router;
use axum::extract::RawQuery;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use krypton_runtime::admin::json;
use krypton_types::conditions::Readiness;
use krypton_types::fleet_tenants::{PATH, Page, Position};
use krypton_types::tenant::{TenantKey, TenantReport};

use crate::observe::member_metrics::FleetView;

/// The parameters of a request. Kubernetes names need no escapes in a URL.
#[derive(Debug, Default, PartialEq)]
struct Query<'a> {
    member: Option<&'a str>,
    namespace: Option<&'a str>,
    name: Option<&'a str>,
    not_ready: bool,
    after: Option<Position>,
}

impl<'a> Query<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let mut query = Self::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=').unwrap_or((pair, "")) {
                ("member", member) => query.member = Some(member),
                ("namespace", namespace) => query.namespace = Some(namespace),
                ("name", name) => query.name = Some(name),
                ("notReady", value) => query.not_ready = value == "true",
                ("after", position) => query.after = Some(position.parse()?),
                (other, _) => return Err(format!("there is no parameter {other}")),
            }
        }
        Ok(query)
    }

    fn wants(&self, key: &TenantKey, report: &TenantReport, allow_chart_skip: bool) -> bool {
        let is = |wanted: Option<&str>, found: &str| wanted.is_none_or(|wanted| wanted == found);
        let is_ready = || Readiness::of(&report.state, allow_chart_skip) == Readiness::Ready;
        is(self.namespace, &key.namespace)
            && is(self.name, &key.name)
            && !(self.not_ready && is_ready())
    }
}

/// Serves the pages. `?member=`, `namespace=` and `name=` select Tenants, `notReady=true` omits ready ones, and `after=`
/// is the position at which the previous page ended.
pub fn router(view: Arc<FleetView>) -> Router {
    let answer = move |RawQuery(query): RawQuery| async move {
        match Query::parse(&query.unwrap_or_default()) {
            Ok(query) => page(&view, &query),
            Err(error) => (StatusCode::BAD_REQUEST, error).into_response(),
        }
    };
    Router::new().route(PATH, get(answer))
}

fn page(view: &FleetView, query: &Query<'_>) -> Response {
    let Some(acting) = view.acting().filter(|acting| acting.lead.serves()) else {
        let text = "this hub is not the leader, which has the reports";
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    let skip = acting.allow_chart_skip;
    let wants = |key: &TenantKey, report: &TenantReport| query.wants(key, report, skip);
    let after = query.after.as_ref();
    let (tenants, next) = view.reports.page(query.member, after, wants);
    let next = next.map(|position| position.to_string());
    json(&Page { tenants, next })
}

#[cfg(test)]
mod tests {
    use krypton_types::conditions::{ClusterState, State, Truth};
    use krypton_types::fleet_tenants::{FleetTenant, PAGE_MAX};

    use super::*;
    use crate::members::tenant_reports::Changed;

    fn tenant(namespace: &str, truth: Truth) -> FleetTenant {
        FleetTenant {
            member: "edge-1".to_owned(),
            key: TenantKey {
                namespace: namespace.to_owned(),
                name: "acme".to_owned(),
            },
            report: TenantReport {
                observed_generation: 1,
                applied_chart: String::new(),
                state: ClusterState::from(State::new(truth, "R", "")),
                next: None,
            },
        }
    }

    #[test]
    fn pages_list_each_reported_tenant_once() {
        let view = FleetView::default();
        let count = PAGE_MAX + 5;
        for member in ["edge-1", "edge-2"] {
            let reports = (0..count).map(|number| {
                let FleetTenant {
                    mut key, report, ..
                } = tenant("a", Truth::True);
                key.name = format!("{number:05}");
                (key, Some(report))
            });
            view.reports.report(member, Changed::new(reports.collect()));
        }
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let (tenants, next) = view.reports.page(None, after.as_ref(), |_, _| true);
            assert!(tenants.len() <= PAGE_MAX);
            found.extend(tenants.into_iter().map(|tenant| Position {
                member: tenant.member,
                key: tenant.key,
            }));
            match next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        assert!(found.is_sorted_by(|one, next| one < next));
        assert_eq!(found.len(), 2 * count);
        let (one, _) = view.reports.page(Some("edge-2"), None, |_, _| true);
        assert!(one.iter().all(|tenant| tenant.member == "edge-2"));
        assert_eq!(one.len(), PAGE_MAX);
        // Reports that are not wanted need no page of their own.
        let last = |key: &TenantKey, _: &TenantReport| key.name == format!("{:05}", count - 1);
        let (wanted, next) = view.reports.page(None, None, last);
        assert_eq!((wanted.len(), next), (2, None));
    }

    #[test]
    fn query_selects_by_namespace_name_and_readiness() {
        let (ready, failed) = (tenant("a", Truth::True), tenant("b", Truth::False));
        for (text, expected) in [
            ("", [true, true]),
            ("namespace=a", [true, false]),
            ("name=acme", [true, true]),
            ("name=other", [false, false]),
            ("notReady=true", [false, true]),
            ("notReady=false", [true, true]),
        ] {
            let query = Query::parse(text).unwrap();
            let found =
                [&ready, &failed].map(|tenant| query.wants(&tenant.key, &tenant.report, false));
            assert_eq!(found, expected, "{text}");
        }
        for text in ["limit=1", "after=edge-1"] {
            assert!(Query::parse(text).is_err(), "{text}");
        }
    }
}
