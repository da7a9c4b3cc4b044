//! The table of the Tenants on all members.

use krypton_types::fleet_tenants::FleetTenant;
use serde_json::json;

use super::output::Output;
use super::tenants::phase_and_message;
use crate::error::KubectlError;
use crate::output::OutputFormat;
use crate::render::{CommandOutput, Table, View, chart_cell, message_cell, one_line};

const HEADER: [&str; 7] = [
    "MEMBER",
    "NAMESPACE",
    "NAME",
    "PHASE",
    "READY",
    "CHART",
    "MESSAGE",
];

pub(super) fn fleet_output(
    tenants: &[FleetTenant],
    output: Option<&Output>,
    has_header: bool,
    view: View,
) -> Result<CommandOutput, KubectlError> {
    if let Some(output) = output.filter(|output| output.is_document()) {
        let document = json!({ "items": tenants });
        return output.encode(&document).map(CommandOutput::stdout);
    }
    if matches!(output, Some(Output::Format(OutputFormat::Name))) {
        let name = |tenant: &FleetTenant| {
            let name = format!("{}/{}", tenant.member, tenant.key);
            one_line(&name) + "\n"
        };
        return Ok(CommandOutput::stdout(
            tenants.iter().map(name).collect::<String>(),
        ));
    }
    if tenants.is_empty() {
        return Ok(CommandOutput {
            stderr: "No Tenants found\n".to_owned(),
            ..CommandOutput::default()
        });
    }
    let mut table = Table::new(HEADER).with_header(has_header);
    for tenant in tenants {
        table.push(row(tenant, view));
    }
    Ok(CommandOutput::stdout(table.render()))
}

fn row(tenant: &FleetTenant, view: View) -> Vec<String> {
    let report = &tenant.report;
    let (phase, ready, message) = phase_and_message(&report.state);
    let chart = Some(report.applied_chart.as_str()).filter(|chart| !chart.is_empty());
    vec![
        one_line(&tenant.member),
        one_line(&tenant.key.namespace),
        one_line(&tenant.key.name),
        phase.to_owned(),
        ready.as_str().to_owned(),
        chart_cell(chart, view),
        message_cell(Some(&message), view),
    ]
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use krypton_types::conditions::{State, Truth};
    use krypton_types::tenant::{TenantKey, TenantReport};

    use super::*;

    #[test]
    fn fleet_table_has_row_for_each_reported_tenant() {
        let tenant = |member: &str, truth, reason: &str, chart: &str| FleetTenant {
            member: member.to_owned(),
            key: TenantKey::new("default", "acme"),
            report: TenantReport {
                applied_chart: chart.to_owned(),
                ..TenantReport::new(1, State::new(truth, reason, "why"))
            },
        };
        let tenants = [
            tenant("edge-1", Truth::True, "HelmInstalled", "https://r/c:1.0.0"),
            tenant("edge-2", Truth::False, "NotReady", ""),
        ];
        let view = View {
            wide: false,
            now: Timestamp::UNIX_EPOCH,
        };
        let expected = "\
MEMBER   NAMESPACE   NAME   PHASE     READY   CHART     MESSAGE
edge-1   default     acme   Ready     True    c:1.0.0   HelmInstalled: why
edge-2   default     acme   Pending   False   -         NotReady: why
";
        let table = fleet_output(&tenants, None, true, view).unwrap().stdout;
        assert_eq!(table, expected);
        let rows = fleet_output(&tenants, None, false, view).unwrap().stdout;
        assert_eq!(rows.lines().count(), 2, "{rows}");
        let format = Output::Format(OutputFormat::Json);
        let output = fleet_output(&tenants, Some(&format), true, view).unwrap();
        let json: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
        assert_eq!(json["items"][1]["member"], "edge-2");
        let none = fleet_output(&[], None, true, view).unwrap();
        assert_eq!(none.stdout, "");
        assert_eq!(none.stderr, "No Tenants found\n");
    }
}
