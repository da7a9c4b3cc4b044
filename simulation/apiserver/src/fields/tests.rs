use super::*;

#[test]
fn built_in_types_resolve() {
    let schema = Schema::built_in("apps/v1", "Deployment").unwrap();
    println!("{}", schema.empty());
}
