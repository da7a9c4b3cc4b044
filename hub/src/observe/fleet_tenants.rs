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
use krypton_types::labels;
use krypton_types::tenant::{TenantKey, TenantReport};
use kube::core::Selector;

use crate::observe::member_metrics::FleetView;

/// The parameters of a request. Kubernetes names need no escapes in a URL, and a selector needs them only for spaces.
#[derive(Debug, Default, PartialEq)]
struct TenantQuery<'a> {
    member: Option<&'a str>,
    namespace: Option<&'a str>,
    name: Option<&'a str>,
    not_ready: bool,
    selector: Selector,
    after: Option<Position>,
}

impl<'a> TenantQuery<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let mut query = Self::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=').unwrap_or((pair, "")) {
                ("member", member) => query.member = Some(member),
                ("namespace", namespace) => query.namespace = Some(namespace),
                ("name", name) => query.name = Some(name),
                ("notReady", value) => query.not_ready = value == "true",
                ("labelSelector", selector) => {
                    query.selector = labels::parse_selector(&selector.replace('+', " "))
                        .map_err(|error| error.to_string())?;
                }
                ("after", position) => query.after = Some(position.parse()?),
                (other, _) => return Err(format!("there is no parameter {other}")),
            }
        }
        Ok(query)
    }

    fn selects(&self, key: &TenantKey, report: &TenantReport, allow_chart_skip: bool) -> bool {
        let matches =
            |wanted: Option<&str>, value: &str| wanted.is_none_or(|wanted| wanted == value);
        let is_ready =
            || Readiness::from_state(&report.state, allow_chart_skip) == Readiness::Ready;
        matches(self.namespace, &key.namespace)
            && matches(self.name, &key.name)
            && !(self.not_ready && is_ready())
            && report.labels.match_selector(&self.selector)
    }
}

/// Serves the pages. `?member=`, `namespace=`, `name=` and `labelSelector=`, with `+` for a space, select Tenants.
/// `notReady=true` omits ready ones, and `after=` is the position at which the previous page ended.
pub fn router(view: Arc<FleetView>) -> Router {
    let handler = move |RawQuery(query): RawQuery| async move {
        match TenantQuery::parse(&query.unwrap_or_default()) {
            Ok(query) => page(&view, &query),
            Err(error) => (StatusCode::BAD_REQUEST, error).into_response(),
        }
    };
    Router::new().route(PATH, get(handler))
}

fn page(view: &FleetView, query: &TenantQuery<'_>) -> Response {
    let home_state = view.home_state.get();
    let Some(home_state) = home_state.filter(|it| it.leader.serves_agents()) else {
        let text = "this hub is not the leader, which has the reports";
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    let skip = home_state.allow_chart_skip;
    let selects = |key: &TenantKey, report: &TenantReport| query.selects(key, report, skip);
    let after = query.after.as_ref();
    let (tenants, next) = view.reports.page(query.member, after, selects);
    let next = next.map(|position| position.to_string());
    json(&Page { tenants, next })
}

#[cfg(test)]
mod tests {
    use krypton_types::conditions::{State, Truth, reason};
    use krypton_types::fleet_tenants::{FleetTenant, PAGE_MAX};
    use krypton_types::labels::Labels;

    use super::*;
    use crate::members::tenant_reports::{ReportState, TenantReportChanges};

    fn tenant(namespace: &str, truth: Truth) -> FleetTenant {
        FleetTenant {
            member: "edge-1".to_owned(),
            key: TenantKey::new(namespace, "acme"),
            report: TenantReport::new(1, State::new(truth, "R", "")),
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
            view.reports
                .apply(member, TenantReportChanges::new(reports.collect()));
        }
        let (mut positions, mut after) = (Vec::new(), None);
        loop {
            let (tenants, next) = view.reports.page(None, after.as_ref(), |_, _| true);
            assert!(tenants.len() <= PAGE_MAX);
            positions.extend(tenants.into_iter().map(|tenant| Position {
                member: tenant.member,
                key: tenant.key,
            }));
            match next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        assert!(positions.is_sorted_by(|one, next| one < next));
        assert_eq!(positions.len(), 2 * count);
        let (one, _) = view.reports.page(Some("edge-2"), None, |_, _| true);
        assert!(one.iter().all(|tenant| tenant.member == "edge-2"));
        assert_eq!(one.len(), PAGE_MAX);
        // Unwanted reports need no separate page.
        let last = |key: &TenantKey, _: &TenantReport| key.name == format!("{:05}", count - 1);
        let (wanted, next) = view.reports.page(None, None, last);
        assert_eq!((wanted.len(), next), (2, None));
    }

    #[test]
    fn ready_tenant_of_lost_member_is_not_ready() {
        let view = FleetView::default();
        let FleetTenant { key, report, .. } = tenant("a", Truth::True);
        let changes = TenantReportChanges::new([(key, Some(report))].into());
        view.reports.apply("edge-1", changes);
        let silent = ReportState::Silent("no answer".to_owned());
        view.reports.set_report_state("edge-1", silent);
        let query = TenantQuery::parse("notReady=true").unwrap();
        let selects = |key: &TenantKey, report: &TenantReport| query.selects(key, report, false);
        let (tenants, _) = view.reports.page(None, None, selects);
        let ready = tenants
            .first()
            .map(|tenant| tenant.report.state.ready.clone());
        let expected = State::new(Truth::Unknown, reason::CLUSTER_UNREACHABLE, "no answer");
        assert_eq!(ready, Some(expected));
    }

    #[test]
    fn query_selects_by_name_readiness_and_labels() {
        let (mut ready, failed) = (tenant("a", Truth::True), tenant("b", Truth::False));
        ready.report.labels = Labels::new(&[("team".to_owned(), "one".to_owned())].into());
        for (text, expected) in [
            ("", [true, true]),
            ("namespace=a", [true, false]),
            ("name=acme", [true, true]),
            ("name=other", [false, false]),
            ("notReady=true", [false, true]),
            ("notReady=false", [true, true]),
            ("labelSelector=team=one", [true, false]),
            ("labelSelector=team+in+(one,two)", [true, false]),
            ("labelSelector=!team&namespace=b", [false, true]),
            ("labelSelector=", [true, true]),
        ] {
            let query = TenantQuery::parse(text).unwrap();
            let selected =
                [&ready, &failed].map(|tenant| query.selects(&tenant.key, &tenant.report, false));
            assert_eq!(selected, expected, "{text}");
        }
        for text in ["limit=1", "after=edge-1", "labelSelector=a=b=c"] {
            assert!(TenantQuery::parse(text).is_err(), "{text}");
        }
    }
}
